"""Minutes that exchanges take to a loss, over links, beside PyTorch's."""
