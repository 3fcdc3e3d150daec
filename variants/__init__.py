"""Whole scripts beside the core, behind the same files. They import the core, never the reverse."""
