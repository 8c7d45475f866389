"""From a candidate to live state: resolve, read, verify, apply."""
