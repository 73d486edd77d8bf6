"""Twenty awkward shapes, written down before anything was tuned for them.

A shape is a tree of arrays and a number of workers. It is compared with the
friendly shape: a float32 matrix of rows of 1024 values, on 4 workers. Its rows
are a multiple of 128, so that 4 workers and the 32 planes of one-bit words all
take whole rows.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxmotion import codecs

FRIENDLY_WORKERS = 4
"""Number of workers that the friendly shape is reduced over."""

_COLUMNS, _ROWS_STEP = 1024, 128


class Awkward(NamedTuple):
  """Describes a tree of arrays and its number of workers."""

  # Shapes of the float32 arrays of the tree.
  shapes: tuple[tuple[int, ...], ...]
  workers: int = FRIENDLY_WORKERS  # Number of workers.


# Kernels, norms and the classifier of a small residual network.
_CONVOLUTIONS = (
  (7, 7, 3, 64),
  *[(3, 3, 64, 64)] * 4,
  (1, 1, 64, 128),
  (3, 3, 64, 128),
  *[(3, 3, 128, 128)] * 3,
  (3, 3, 128, 256),
  *[(64,)] * 10,
  *[(128,)] * 10,
  *[(256,)] * 2,
  (256, 1000),
  (1000,),
)

# Matrices, convolutions, vectors and biases, no two of one shape.
_MIXED_LEAVES = tuple(
  shape
  for i in range(64)
  for shape in ((48 + i, 211), (3, 3, 17, 16 + i), (65 * i + 99,), (5 + i,))
)

AWKWARD = {
  "matrix_3": Awkward(((1024, 1024),), workers=3),
  "matrix_5": Awkward(((1024, 1024),), workers=5),
  "matrix_6": Awkward(((1024, 1024),), workers=6),
  "matrix_7": Awkward(((1024, 1024),), workers=7),
  "vocabulary_3": Awkward(((50257, 192),), workers=3),
  "prime_rows_5": Awkward(((5003, 768),), workers=5),
  "prime_rows_7": Awkward(((5003, 768),), workers=7),
  "vector": Awkward(((1 << 22,),)),
  "prime_vector": Awkward(((1000003,),)),
  "prime_vector_6": Awkward(((1000003,),), workers=6),
  "odd_columns": Awkward(((4096, 1001),)),
  "three_rows": Awkward(((3, 333333),)),
  "one_row": Awkward(((1, 1 << 20),)),
  "one_column": Awkward(((1 << 20, 1),)),
  "five_columns": Awkward(((200003, 5),)),
  "primes": Awkward(((61, 127, 131),)),
  "convolutions": Awkward(_CONVOLUTIONS),
  "leaves256": Awkward(((128, 128),) * 256),
  "leaves256_mixed": Awkward(_MIXED_LEAVES),
  "scalar_and_empty": Awkward(((), (0, 512), (1,), (1024, 1000))),
}
"""Awkward shape by name; the number at a name's end is that of the workers."""

PLAIN = "identity"
"""Name of the codec that shows what a shape costs XLA without any codec."""

_SMALL = 1 << 15

CODECS = {
  PLAIN: codecs.identity(),
  "int8": codecs.uniform(bits=8),
  "int4": codecs.uniform(bits=4),
  "sign_feedback": codecs.feedback(codecs.sign()),
  "topk1_feedback": codecs.feedback(codecs.topk(density=0.01)),
  "int8_buckets": codecs.buckets(codecs.uniform(bits=8), max_leaf_size=_SMALL),
  "sign_feedback_buckets": codecs.buckets(
    codecs.feedback(codecs.sign()), max_leaf_size=_SMALL
  ),
  "topk1_feedback_buckets": codecs.buckets(
    codecs.feedback(codecs.topk(density=0.01)), max_leaf_size=_SMALL
  ),
}
"""Codec by name; each encodes every shape, and those of trees every tree."""


def count_values(shapes: Sequence[tuple[int, ...]]) -> int:
  """Returns the number of values of arrays of these shapes."""
  return sum(map(math.prod, shapes))


def find_friendly(values: int) -> Awkward:
  """Returns the friendly shape whose number of values is nearest.

  >>> find_friendly(1000003)
  Awkward(shapes=((1024, 1024),), workers=4)
  """
  step = _COLUMNS * _ROWS_STEP
  rows = _ROWS_STEP * max(1, round(values / step))
  return Awkward(((rows, _COLUMNS),))
