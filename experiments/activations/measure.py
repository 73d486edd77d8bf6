"""Bytes of a network's activations under every code, at one snapshot."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.activations import cases, codes, sampling

MARGIN = 0.1
"""Room of a tile beyond the calibrated room, relative to that."""


class Layer(NamedTuple):
  """Bytes of one activation under every code.

  Attributes:
    name: name of the layer whose output it is.
    elements: number of elements.
    zeros: number of elements that are zero.
    code_bytes: bytes of all elements, by code.
    tiles: number of tiles of `OURS`.
    overflows: number of tiles of `OURS` with too little room; if there is one,
      the array travels uncompressed.
    bf16_error: error of rounding to bf16, relative to the activation's norm.
  """

  name: str
  elements: int
  zeros: int
  code_bytes: dict[str, int]
  tiles: int
  overflows: int
  bf16_error: float

  @property
  def sparsity(self) -> float:
    """Share of elements that are zero."""
    return self.zeros / self.elements

  def ratio(self, code: str) -> float:
    """Returns the bytes in float32 over the bytes of a code."""
    return 4 * self.elements / self.code_bytes[code]


class Measured(NamedTuple):
  """All activations of a network at one snapshot.

  Attributes:
    net: name of the network.
    step: number of training steps done.
    loss: loss of the held-out images of the snapshot, in nats.
    accuracy: accuracy on held-out images, in per cent.
    layers: layers in the order of the forward pass.
  """

  net: str
  step: int
  loss: float
  accuracy: float
  layers: list[Layer]

  @property
  def sparsity(self) -> float:
    """Share of the elements of all layers that are zero."""
    zeros = sum(layer.zeros for layer in self.layers)
    return zeros / sum(layer.elements for layer in self.layers)

  @property
  def overflow_rate(self) -> float:
    """Share of the tiles of `OURS` with too little room."""
    tiles = sum(layer.tiles for layer in self.layers)
    return sum(layer.overflows for layer in self.layers) / tiles

  def ratio(self, code: str) -> float:
    """Returns the bytes of all layers in float32 over those of a code."""
    plain = sum(4 * layer.elements for layer in self.layers)
    return plain / sum(layer.code_bytes[code] for layer in self.layers)


def measure_snapshot(net: str, snapshot: sampling.Snapshot) -> Measured:
  """Measures the held-out activations of a snapshot."""
  # The room of tiles is calibrated with the snapshot's training images.
  layers = [
    measure_layer(name, snapshot.calibration[name], x)
    for name, x in snapshot.held_out.items()
  ]
  return Measured(net, snapshot.step, snapshot.loss, snapshot.accuracy, layers)


def measure_layer(name: str, calibration: np.ndarray, x: np.ndarray) -> Layer:
  """Measures one activation under every code."""
  flat = codes.to_words(x)
  first = codes.to_words(np.moveaxis(x, -1, 1))
  narrow = x.astype(jnp.bfloat16)
  layouts = {
    "zero_value_nhwc": (calibration, x, "nhwc"),
    "zero_value": (calibration, x, "spread"),
    cases.OURS: (calibration.astype(jnp.bfloat16), narrow, "spread"),
  }
  ours = {
    code: _measure_zero_value(*layout) for code, layout in layouts.items()
  }
  tiles, _, overflows = ours[cases.OURS]
  return Layer(
    name,
    x.size,
    int(x.size - np.count_nonzero(flat)),
    {
      "rle_nhwc": codes.run_length_bytes(flat),
      "rle_nchw": codes.run_length_bytes(first),
      cases.PUBLISHED_CODE: codes.zero_value_bytes(flat),
      "zvc16": codes.zero_value_bytes(codes.to_words(narrow)),
      **{code: code_bytes for code, (_, code_bytes, _) in ours.items()},
      "planes_zlib": codes.entropy_bytes(flat),
    },
    tiles,
    overflows,
    _relative_error(narrow.astype(np.float32), x),
  )


def _measure_zero_value(
  calibration: np.ndarray, x: np.ndarray, layout: str
) -> tuple[int, int, int]:
  """Returns number of tiles, bytes, and number of tiles that overflow."""
  room = codes.calibrate_room(codes.cut_tiles(calibration, layout), MARGIN)
  tiles = codes.cut_tiles(x, layout)
  overflows = codes.count_overflows(tiles, room)
  coded = codes.payload_bytes(len(tiles), room, x.dtype.name)
  # An overflow is known only after encoding: the payload counts as well then.
  total = coded + x.nbytes if overflows else min(coded, x.nbytes)
  return len(tiles), total, overflows


def _relative_error(y: np.ndarray, x: np.ndarray) -> float:
  norm = float(np.linalg.norm(x))
  return float(np.linalg.norm(y - x)) / norm if norm else 0.0


def check_largest(snapshot: sampling.Snapshot) -> tuple[str, int]:
  """Encodes a snapshot's largest activation, decodes it and compares."""
  # Returns the name of the activation, and the bytes of the payload's buffers.
  name = max(snapshot.held_out, key=lambda name: snapshot.held_out[name].size)
  x = jnp.asarray(snapshot.held_out[name], "bfloat16")
  room = codes.calibrate_room(codes.cut_tiles(np.asarray(x), "spread"), MARGIN)
  codec = codes.make_codec(room)
  tiles = jax.jit(codes.spread_tiles)(x)
  payload, _ = jax.jit(codec.encode)(tiles)
  decoded = codes.gather_tiles(jax.jit(codec.decode)(payload, tiles), x)
  buffers = sum(leaf.nbytes for leaf in jax.tree.leaves(payload))
  expected = codes.payload_bytes(len(tiles), room, "bfloat16")
  if buffers != expected or not np.array_equal(decoded, x):
    raise AssertionError(
      f"{name} must take {expected} bytes and decode exactly, got {buffers}"
      " bytes."
    )
  return name, buffers
