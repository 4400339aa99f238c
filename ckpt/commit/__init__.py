"""Atomic commits of saves, and the removal of files that dead jobs have left."""
