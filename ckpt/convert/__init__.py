"""Conversion of checkpoints to other formats and files, and back."""
