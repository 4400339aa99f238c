"""The common part of the fuzz tests: what a target is, how inputs are mutated, and the workers that read them."""
