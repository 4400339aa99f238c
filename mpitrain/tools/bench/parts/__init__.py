"""Benchmarks of single parts of a training step, beside their peers."""
