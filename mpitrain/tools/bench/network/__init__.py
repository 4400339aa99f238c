"""Benchmarks of training over links that are slower than the cores: what fewer bytes save, and what they cost in loss."""
