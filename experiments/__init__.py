"""Experiments: runnable training jobs that measure what an exchange costs."""
