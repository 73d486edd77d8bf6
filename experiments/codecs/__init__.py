"""Times of codecs against one copy of the same array."""
