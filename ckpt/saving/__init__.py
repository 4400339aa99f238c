"""Saving: agreement between the ranks, the blocks that each rank writes, the drivers, background saves, copies."""
