"""A unit: the parameters in a flat buffer, the rows of each rank, the memory of full parameters, and the gradients."""
