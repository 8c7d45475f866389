"""Adapters between the engine and training frameworks, one package per framework.

They import the engine; the engine never imports them.
"""
