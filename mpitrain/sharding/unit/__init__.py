"""A unit: parameters in one flat buffer, the ranks' rows of it, where full parameters live, and their gradients."""
