"""Functions between the backward and the optimizer's step: norms, scaling, averages, and checks of optimizers on shards."""
