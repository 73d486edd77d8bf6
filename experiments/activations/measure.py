"""What each code makes of a network's activations at one look."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.activations import codes
from experiments.activations.sampling import Look

MARGIN = 0.1
"""Share of a tile's values that a calibrated room has more than it needed."""

PUBLISHED_CODE = "zvc32"
OURS = "zero_value_bf16"
CODES = {
  "rle_nhwc": "run-length, channels last",
  "rle_nchw": "run-length, channels first",
  PUBLISHED_CODE: "cDMA's zero-value code, 32-bit words",
  "zvc16": "the same, bf16 words",
  "zero_value_nhwc": "zero_value, float32, tiles of neighbours",
  "zero_value": "zero_value, float32, spread tiles",
  OURS: "zero_value, bf16 words, spread tiles",
  "planes_zlib": "mask and byte planes under zlib, on the host",
}
"""What is compared; the last is for a host, to see what else is there."""


class Layer(NamedTuple):
  """One activation.

  Attributes:
    name: of the layer that makes it.
    values: how many.
    zeros: how many of them are zero.
    code_bytes: by code, of all values.
    tiles: of `OURS`.
    overflows: those with too little room, of `OURS`; the array then goes
      plain.
    bf16_error: of rounding, relative to the norm of the activation.
  """

  name: str
  values: int
  zeros: int
  code_bytes: dict[str, int]
  tiles: int
  overflows: int
  bf16_error: float

  @property
  def sparsity(self) -> float:
    """Share of zeros."""
    return self.zeros / self.values

  def ratio(self, code: str) -> float:
    """Bytes of float32 over those of a code."""
    return 4 * self.values / self.code_bytes[code]


class Measured(NamedTuple):
  """All activations of a network at one look.

  Attributes:
    net: the network's name.
    step: of training.
    loss: in nats.
    accuracy: in per cent.
    layers: in the order of the forward pass.
  """

  net: str
  step: int
  loss: float
  accuracy: float
  layers: list[Layer]

  @property
  def sparsity(self) -> float:
    """Share of zeros of all values."""
    zeros = sum(layer.zeros for layer in self.layers)
    return zeros / sum(layer.values for layer in self.layers)

  @property
  def overflow_rate(self) -> float:
    """Share of `OURS`' tiles that had too little room."""
    tiles = sum(layer.tiles for layer in self.layers)
    return sum(layer.overflows for layer in self.layers) / tiles

  def ratio(self, code: str) -> float:
    """Bytes of all activations in float32 over those of a code."""
    plain = sum(4 * layer.values for layer in self.layers)
    return plain / sum(layer.code_bytes[code] for layer in self.layers)


def measure(net: str, look: Look) -> Measured:
  """Measures the held-out activations of a look; rooms are calibrated before.

  Args:
    net: the network's name.
    look: from `_train.train`.
  """
  layers = [
    measure_layer(name, look.calibration[name], x)
    for name, x in look.held_out.items()
  ]
  return Measured(net, look.step, look.loss, look.accuracy, layers)


def measure_layer(name: str, calibration: np.ndarray, x: np.ndarray) -> Layer:
  """Measures one activation.

  Args:
    name: of the layer.
    calibration: float32, another batch's; says how much room a tile has.
    x: float32, channels last.
  """
  flat = codes.words(x)
  first = codes.words(np.moveaxis(x, -1, 1))
  narrow = x.astype(jnp.bfloat16)
  layouts = {
    "zero_value_nhwc": (calibration, x, "nhwc"),
    "zero_value": (calibration, x, "spread"),
    OURS: (calibration.astype(jnp.bfloat16), narrow, "spread"),
  }
  ours = {code: _zero_value(*layout) for code, layout in layouts.items()}
  tiles, _, overflows = ours[OURS]
  return Layer(
    name,
    x.size,
    int(x.size - np.count_nonzero(flat)),
    {
      "rle_nhwc": codes.run_length_bytes(flat),
      "rle_nchw": codes.run_length_bytes(first),
      PUBLISHED_CODE: codes.zero_value_bytes(flat),
      "zvc16": codes.zero_value_bytes(codes.words(narrow)),
      **{code: code_bytes for code, (_, code_bytes, _) in ours.items()},
      "planes_zlib": codes.entropy_bytes(flat),
    },
    tiles,
    overflows,
    _relative_error(narrow.astype(np.float32), x),
  )


def _zero_value(
  calibration: np.ndarray, x: np.ndarray, layout: str
) -> tuple[int, int, int]:
  """(tiles, bytes, tiles that overflow); plain where that is not worse."""
  room = codes.room(codes.tiled(calibration, layout), MARGIN)
  tiles = codes.tiled(x, layout)
  overflows = codes.overflows(tiles, room)
  coded = codes.payload_bytes(len(tiles), room, x.dtype.name)
  # The payload was made before anyone could know that it has no room.
  total = coded + x.nbytes if overflows else min(coded, x.nbytes)
  return len(tiles), total, overflows


def _relative_error(y: np.ndarray, x: np.ndarray) -> float:
  norm = float(np.linalg.norm(x))
  return float(np.linalg.norm(y - x)) / norm if norm else 0.0


def check(look: Look) -> tuple[str, int]:
  """Really encodes a look's largest activation and decodes it again.

  Args:
    look: from `_train.train`.

  Returns:
    Its name, and the bytes of the payload's buffers.

  Raises:
    AssertionError: the values are not those that were encoded, or the bytes not
      those that are counted everywhere else.
  """
  name = max(look.held_out, key=lambda name: look.held_out[name].size)
  x = jnp.asarray(look.held_out[name], "bfloat16")
  room = codes.room(codes.tiled(np.asarray(x), "spread"), MARGIN)
  codec = codes.make_codec(room)
  tiles = jax.jit(codes.spread)(x)
  payload, _ = jax.jit(codec.encode)(tiles)
  decoded = codes.unspread(jax.jit(codec.decode)(payload, tiles), x)
  buffers = sum(leaf.nbytes for leaf in jax.tree.leaves(payload))
  counted = codes.payload_bytes(len(tiles), room, "bfloat16")
  if buffers != counted or not np.array_equal(decoded, x):
    raise AssertionError(f"{name}: {buffers} bytes, {counted} counted")
  return name, buffers
