"""Timelines of all ranks in some steps."""
