"""Codecs made of other codecs: of leaves, with memory, or in rounds."""
