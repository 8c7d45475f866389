"""Megatron pretraining scripts: nothing is built here yet."""
