"""Generated exchanges: workers, codec, shapes, policy and values."""

import dataclasses

import jax
import numpy as np

from jaxmotion import codecs

_BASES = (
  codecs.identity(),
  codecs.cast("bfloat16"),
  codecs.truncate(bytes=3),
  codecs.uniform(bits=8),
  codecs.uniform(bits=8, rounding="stochastic", block=33),
  codecs.uniform(bits=4, symmetric=False, block=64),
  codecs.uniform(bits=1),
  codecs.sign(block=64),
  codecs.ternary(block=64),
  codecs.microscaling(format="float8_e4m3fn"),
  codecs.topk(density=0.1),
  codecs.topk(density=0.5, block=64),
  codecs.random_k(density=0.3),
  codecs.random_k(density=0.3, scaled=False),
  codecs.threshold(value=0.5, capacity=0.5),
  codecs.zero_value(capacity=1.0),
  codecs.chain(codecs.topk(density=0.1), codecs.uniform(bits=8)),
  codecs.chain(codecs.rotate(block=64), codecs.uniform(bits=4)),
)
_SHAPES = ((0,), (0, 3), (), (1,), (5,), (63,), (64,), (129,), (700,))
_MATRICES = ((64, 8), (13, 77), (128, 3), (3, 4, 33), (1, 300), (260, 1))
_FAMILIES = ("normal", "tiny", "large", "zeros", "sparse", "equal", "integers")


@dataclasses.dataclass(frozen=True)
class Setup:
  """One exchange of one tree; its programs serve many values.

  Attributes:
    hosts: workers along the axis that compresses.
    codec: codec, or one for each level.
    shapes: shape of each leaf.
    dtypes: dtype of each leaf.
    devices: workers along the local axis; 0 for an exchange without one.
    op: "mean" or "sum".
    method: "gather", "two_phase" or None.
    nonfinite: policy.
    weighted: whether workers have weights.
    local_codec: codec within a host, or None.
    seed: seed of the exchange.
  """

  hosts: int
  codec: codecs.Codec | tuple[codecs.Codec, ...]
  shapes: tuple[tuple[int, ...], ...]
  dtypes: tuple[str, ...]
  devices: int = 0
  op: str = "mean"
  method: str | None = None
  nonfinite: str = "propagate"
  weighted: bool = False
  local_codec: codecs.Codec | None = None
  seed: int = 0

  @property
  def workers(self) -> int:
    """Workers of both axes."""
    return self.hosts * max(self.devices, 1)

  @property
  def levels(self) -> tuple[codecs.Codec, ...]:
    """The codec of each level."""
    return (self.codec,) if isinstance(self.codec, codecs.Codec) else self.codec

  @property
  def likes(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape of each leaf of the tree, by its path."""
    return {
      f"leaf{i}": jax.ShapeDtypeStruct(shape, dtype)
      for i, (shape, dtype) in enumerate(
        zip(self.shapes, self.dtypes, strict=True)
      )
    }


def draw_setup(rng: np.random.Generator) -> Setup:
  """Returns an exchange of 1 to 8 workers."""
  hosts, devices = _draw_workers(rng)
  count = int(rng.integers(1, 5))
  shapes = (*_SHAPES, *_MATRICES)
  narrow = rng.random() < 0.3
  dtypes = ("float32", "bfloat16", "float16") if narrow else ("float32",)
  return Setup(
    hosts=hosts,
    devices=devices,
    codec=_draw_codec(count, rng),
    shapes=tuple(shapes[rng.integers(len(shapes))] for _ in range(count)),
    dtypes=tuple(str(rng.choice(dtypes)) for _ in range(count)),
    op=str(rng.choice(("mean", "mean", "sum"))),
    method=(None, "gather", "two_phase")[rng.integers(3)],
    nonfinite=str(rng.choice(("propagate", "skip", "zero"))),
    weighted=bool(rng.random() < 0.4),
    local_codec=(
      codecs.uniform(bits=8) if devices and rng.random() < 0.2 else None
    ),
    seed=int(rng.integers(1 << 16)),
  )


def draw_values(
  setup: Setup, rng: np.random.Generator
) -> dict[str, np.ndarray]:
  """Returns finite values of every leaf, (workers, ...)."""
  return {
    name: _draw_leaf(
      (setup.workers, *like.shape), str(rng.choice(_FAMILIES)), rng
    ).astype(like.dtype)
    for name, like in setup.likes.items()
  }


def draw_weights(setup: Setup, rng: np.random.Generator) -> np.ndarray:
  """Returns finite weights whose sum is not zero unless all are."""
  workers = setup.workers
  kind = rng.integers(5)
  if kind == 0:
    weights = np.zeros(workers)
  elif kind == 1:
    weights = -rng.uniform(0.5, 2, workers)
  elif kind == 2 and setup.op == "mean":
    weights = rng.uniform(1e38, 3e38, workers)
  else:
    weights = rng.integers(0, 4, workers).astype(float)
  return weights.astype(np.float32)


def _draw_workers(rng: np.random.Generator) -> tuple[int, int]:
  if rng.random() < 0.7:
    return int(rng.choice((1, 2, 2, 3, 4, 4, 5, 8))), 0
  pairs = ((1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2))
  return pairs[rng.integers(len(pairs))]


def _draw_codec(
  leaves: int, rng: np.random.Generator
) -> codecs.Codec | tuple[codecs.Codec, ...]:
  def draw_base() -> codecs.Codec:
    return _BASES[rng.integers(len(_BASES))]

  def wrap(codec: codecs.Codec, decay: float, form: str) -> codecs.Codec:
    if not codec.laws.bounds_memory:
      return codec
    return codecs.feedback(codec, decay=decay, form=form)

  decay = (1.0, 1.0, 0.9)[rng.integers(3)]
  form = ("local", "local", "global")[rng.integers(3)]
  kind = rng.integers(8)
  if kind < 2:
    return draw_base()
  if kind < 5:
    return wrap(draw_base(), decay, form)
  if kind == 5:
    remembers = rng.random() < 0.5
    levels = [draw_base() for _ in range(rng.integers(1, 4))]
    remembers &= all(codec.laws.bounds_memory for codec in levels)
    return tuple(wrap(c, decay, form) if remembers else c for c in levels)
  if kind == 6:
    joined = codecs.buckets(draw_base(), max_leaf_size=200)
    return wrap(joined, decay, form)
  first = wrap(draw_base(), decay, form)
  # Every rule must match a leaf: one less than there are leaves, and the rest.
  named = [
    (f"{i}$", (first, draw_base())[i]) for i in range(min(leaves - 1, 2))
  ]
  return codecs.rules((*named, ("", draw_base())))


def _draw_leaf(
  shape: tuple[int, ...], family: str, rng: np.random.Generator
) -> np.ndarray:
  x = rng.normal(size=shape)
  if family == "tiny":
    return x * 1e-3
  if family == "large":
    return x * 1e2
  if family == "zeros":
    return np.zeros(shape)
  if family == "sparse":
    return np.where(rng.random(shape) < 0.05, x, 0)
  if family == "equal":
    return np.full(shape, float(rng.normal()))
  if family == "integers":
    return np.round(x * 10)
  return x
