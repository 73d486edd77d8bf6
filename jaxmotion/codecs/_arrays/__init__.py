"""Codecs that send fewer bits for each element."""
