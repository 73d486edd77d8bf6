"""Training step: its driver, schemes as values, and steps of one's own."""
