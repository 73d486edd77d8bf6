"""Study of algorithms at equal steps, at equal bytes and at equal time."""
