"""Hugging Face Trainer: nothing is built here yet."""
