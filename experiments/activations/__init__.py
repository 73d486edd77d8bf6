"""Compression of a network's activations, measured while it trains (cDMA)."""
