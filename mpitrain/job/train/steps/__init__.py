"""One step of the training: learning rate, forwards and backwards, checks, and the step of the optimizer."""
