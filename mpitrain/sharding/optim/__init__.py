"""Between the backward and the optimizer's step: norms, scaling, averages, and optimizers on shards."""
