"""Rows of tokens from documents: the same global batches on any number of ranks.

A run has a fixed number of lanes. Each row of a global batch belongs to a lane, and each lane to a rank. A lane reads its own part of
an endless sequence of documents, and its place there is a few integers. So the global batch of a step depends on the seed and the step
alone.
"""
