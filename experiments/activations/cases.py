"""Codes of activations that are compared."""

PUBLISHED_CODE = "zvc32"
"""Code that cDMA's authors publish ratios of."""
OURS = "zero_value_bf16"
"""Smallest code that `jaxmotion.codecs` has for activations."""

CODES = {
  "rle_nhwc": "run-length, channels last",
  "rle_nchw": "run-length, channels first",
  PUBLISHED_CODE: "cDMA's zero-value code, 32-bit words",
  "zvc16": "the same, bf16 words",
  "zero_value_nhwc": "zero_value, float32, tiles of neighbors",
  "zero_value": "zero_value, float32, spread tiles",
  OURS: "zero_value, bf16 words, spread tiles",
  "planes_zlib": "mask and byte planes under zlib, on the host",
}
"""Description of each code; the last is for a host, as a reference."""
