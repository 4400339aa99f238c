"""Atomic commits of saves, and removal of the files that dead jobs left."""
