"""Training on workers of unequal speed; see `experiments.hetgrad`."""
