"""Benchmarks: one question per file, peers side by side in one run, results as data. See README.md beside this."""
