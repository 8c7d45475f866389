"""Where bytes live: the only room that touches files of the storage tier."""
