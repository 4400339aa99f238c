"""Asynchronous operations: what is in flight, and who carries it out."""
