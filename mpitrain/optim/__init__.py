"""What runs between a backward and an optimizer's step on any model whose parameters are spread over ranks, by whatever kind of
parallelism: norms of gradients, and checks of optimizers and of torch's functions."""
