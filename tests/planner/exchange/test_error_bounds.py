"""Error bounds hold for the worst arrays, and are not far above them."""

import numpy as np
import pytest

from jaxmotion import codecs
from jaxmotion.planner.exchange._error_bounds import relative_error_bound
from tests.planner.problems import relative_errors

CODECS = {
  "identity": codecs.identity(),
  "bf16": codecs.cast("bfloat16"),
  "truncate1": codecs.truncate(bytes=1),
  "truncate2": codecs.truncate(bytes=2),
  "truncate2_nearest": codecs.truncate(bytes=2, rounding="nearest"),
  "int8": codecs.uniform(bits=8),
  "int8_stochastic": codecs.uniform(bits=8, rounding="stochastic"),
  "int4": codecs.uniform(bits=4, block=64),
  "int4_minmax": codecs.uniform(bits=4, symmetric=False),
  "int2": codecs.uniform(bits=2, block=64),
  "int1": codecs.uniform(bits=1, block=64),
  "sign": codecs.sign(block=64),
  "topk": codecs.topk(density=0.1),
  "topk_most": codecs.topk(density=0.7),
  "topk_block": codecs.topk(density=0.1, block=40),
  "int4_feedback": codecs.feedback(codecs.uniform(bits=4)),
}


def arrays(count):
  """The worst arrays for levels and selections, and random ones."""
  rng = np.random.default_rng(0)
  spike = np.full(count, 0.49 / 127, np.float32)
  spike[::64] = 1.0
  single = np.full(count, 1e-20, np.float32)
  single[count // 2] = 1.0
  yield from (np.ones(count, np.float32), spike, single)
  for power in (1, 5):
    yield (rng.standard_normal(count) ** power).astype("float32")


@pytest.mark.parametrize("name", CODECS)
def test_errors_of_the_worst_arrays_are_within_the_bound(name):
  codec = CODECS[name]
  count = 2 * 643  # Not a multiple of a block.
  bound = relative_error_bound(codec, count)
  found = relative_errors(codec, np.stack(list(arrays(count))))
  assert max(found) <= bound * (1 + 1e-6)
  if bound and "feedback" not in name:
    assert max(found) > bound / 30  # Not far above the worst error.


def test_narrow_formats_have_no_bound():
  narrow = codecs.cast("float8_e4m3fn")
  assert relative_error_bound(narrow, 10) is None
  assert relative_error_bound(codecs.feedback(narrow), 10) is None
