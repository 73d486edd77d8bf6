"""Calls of the transforms of Flax Linen modules."""

import flax.linen as nn

from jaxmotion import codecs
from tests.arguments.calls import Call

CALLS = {
  "linen.compress_residuals": Call(
    nn.Dense, codecs.uniform(bits=8), recompute="all"
  ),
}
UNCALLED = {}
ACCEPTED = {
  ("linen.compress_residuals", "codec"): {"empty": "no rules: all as without"},
}
KNOWN_BAD = set()
