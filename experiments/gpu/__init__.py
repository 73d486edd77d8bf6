"""Measures kernels, transfers and plans of training on a GPU, in one call."""
