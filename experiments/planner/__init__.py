"""Advice of `jaxmotion.planner` on the training step of a configuration."""
