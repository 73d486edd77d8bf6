"""Codecs that send some of the elements."""
