"""Calls of the command line, which prints a line: tests/command has these."""

UNCALLED = {"command.*": "it raises what the command line prints"}
