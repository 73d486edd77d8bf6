"""Training of one model under every exchange a configuration names."""
