"""What is asked for and checked before a model is sharded, and at its first forward."""
