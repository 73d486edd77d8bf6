"""Training on workers of unequal speed, with shares of the work (HetGrad)."""
