"""Checkpoints to other formats and files, and back."""
