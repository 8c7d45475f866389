"""From live state to a committed checkpoint: staging, flush, commit, retention."""
