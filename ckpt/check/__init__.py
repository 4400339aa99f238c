"""Whether checkpoints are right, and what two of them differ in."""
