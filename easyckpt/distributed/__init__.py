"""Who agrees: the ranks of the job, and what they tell each other through the c10d store, never by collectives."""
