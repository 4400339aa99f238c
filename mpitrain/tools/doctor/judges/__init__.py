"""Judges the facts that the checks have measured: facts in, findings out. Nothing here measures."""
