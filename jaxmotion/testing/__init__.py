"""The laws, as functions to call on codecs and transforms of your own."""
