"""Readers of programs: other rooms call them with programs of their own."""

CALLS = {}
UNCALLED = {
  "program.*": "rooms read the programs that they have traced themselves"
}
ACCEPTED = {}
KNOWN_BAD = set()
