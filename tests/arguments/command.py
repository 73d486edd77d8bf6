"""Calls of the command line."""

CALLS = {}
_LINES = "it raises what the command line prints; tests/command has these lines"
UNCALLED = {"command.*": _LINES}
ACCEPTED = {}
KNOWN_BAD = {}
