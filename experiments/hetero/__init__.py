"""Training on workers of unequal speed; see `experiments.hetero`."""
