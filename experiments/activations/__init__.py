"""How well the activations of a network compress while it trains."""
