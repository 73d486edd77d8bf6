"""Training steps timed on several hosts with a limited link between them."""
