"""Saving: agreement between the ranks, the blocks that each rank writes, the drivers, the background, further copies."""
