"""Batches of torch's datasets for a training loop of the user: the same global batches on any number of ranks.

`batches` is the public function. `rows` makes the part of the global batches that belongs to one rank, in the rank or in its worker
processes, which `workers` starts. `tar` has datasets of images, pairs and other samples in tar files.
"""
