"""Readers of programs: other rooms call them with programs of their own."""

UNCALLED = {"program.*": "rooms read programs that they have traced"}
