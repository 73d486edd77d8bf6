"""Hosts on one machine: namespaces, limited links, a process in each."""
