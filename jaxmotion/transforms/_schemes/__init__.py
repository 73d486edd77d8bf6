"""Schemes that divide parameters between workers, or let them train apart."""
