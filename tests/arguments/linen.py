"""Calls of the transforms of Flax Linen modules."""

import flax.linen as nn

from jaxmotion import codecs
from tests.arguments.memory import BUDGETS, H100

GIVEN = {
  "target": nn.Dense,
  "codec": codecs.uniform(bits=8),
  "memory_budget": 0.0,
  "device": H100,
}
ACCEPTED = {
  ("linen.compress_residuals", "memory_budget"): BUDGETS,
  ("linen.compress_residuals", "codec"): {"empty": "no rules: all as without"},
}
