"""Asynchronous operations: those in flight, and how a rank carries them out."""
