"""Parts of parameters and optimizers that are divided over workers."""
