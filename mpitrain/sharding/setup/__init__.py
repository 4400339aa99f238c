"""The arguments of `fully_shard`, and the checks before a model is sharded and at its first forward."""
