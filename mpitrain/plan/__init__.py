"""Plans of training runs: how long a step takes on a machine, in which layout, and what a long run loses."""
