"""Asynchronous operations: the unfinished ones, and how a rank carries them out."""
