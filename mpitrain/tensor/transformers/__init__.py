"""Models of the library transformers: their plans, and the loss that they compute themselves."""
