"""Checks, timings and compilations of the ops of jaxmotion's kernels."""
