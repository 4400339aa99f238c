"""What a model says of itself: where it may be divided, and which random numbers its forwards draw."""
