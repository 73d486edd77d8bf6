"""Training of networks, and the bytes of their activations under every code."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.console

from experiments import models
from experiments.activations import codes
from experiments.common import loop, progress
from experiments.models import training
from jaxmotion.core import Array, PyTree

_SCORED = 1024  # Held-out images that are scored, at most.
_SAMPLED = 32  # Images of a snapshot, at most.


class Snapshot(NamedTuple):
  """Activations and accuracy of a network after some steps."""

  step: int  # Number of training steps done.
  loss: float  # Mean loss of the held-out images of the snapshot, in nats.
  accuracy: float  # Share of up to 1024 held-out images, in per cent.
  # Activations of a batch of training images, by name.
  calibration: dict[str, np.ndarray]
  # Activations of as many held-out images, by name.
  held_out: dict[str, np.ndarray]


def train_network(
  net: models.Network,
  images: training.ImageData,
  *,
  steps: Sequence[int],
  batch: int,
  seed: int,
  on_snapshot: Callable[[Snapshot], None],
  on_step: loop.OnStep,
) -> float:
  """Trains a network with Adam and takes snapshots at some steps."""
  # Returns the mean time of a step, milliseconds.
  last = steps[-1]
  optimizer = training.make_optimizer(last)
  params = jax.jit(net.init)(jax.random.key(seed))

  @jax.jit
  def update(
    params: PyTree, opt_state: PyTree, batch: tuple[Array, Array]
  ) -> tuple[PyTree, PyTree, Array]:
    loss, grads = jax.value_and_grad(net.loss)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  def step(
    state: tuple[PyTree, PyTree], batch: tuple[Array, Array]
  ) -> tuple[tuple[PyTree, PyTree], float]:
    *state, loss = update(*state, batch)
    return tuple(state), float(loss)

  sampler = _Sampler(net, images, min(batch, _SAMPLED))

  def take_snapshot(done: int, state: tuple[PyTree, PyTree]) -> None:
    if done in steps:
      on_snapshot(sampler.sample(done, state[0]))

  state = params, jax.jit(optimizer.init)(params)
  take_snapshot(0, state)
  _, log = loop.run_steps(
    state,
    step,
    training.make_batches(images.train, batch, seed),
    steps=last,
    checkpoint_every=max(1, last),
    evaluate=take_snapshot,
    on_step=on_step,
  )
  return sum(log.step_ms) / max(1, last)


class _Sampler:
  """Takes snapshots of always the same images."""

  def __init__(
    self, net: models.Network, images: training.ImageData, batch: int
  ):
    self._images = images
    self._batch = batch

    # One program, because its three results share most of the forward pass.
    @jax.jit
    def run(params: PyTree, batch: tuple[Array, Array]) -> tuple:
      logits = net.apply(params, batch[0])
      hits = jnp.sum(logits.argmax(-1) == batch[1])
      return net.loss(params, batch), hits, net.activations(params, batch[0])

    self._run = run

  def sample(self, step: int, params: PyTree) -> Snapshot:
    """Takes a snapshot after a number of steps."""
    _, _, calibration = self._run_batch(self._images.train, 0, params)
    loss, _, held_out = self._run_batch(self._images.test, 0, params)
    count = min(_SCORED, len(self._images.test.labels)) // self._batch
    hits = sum(
      int(self._run_batch(self._images.test, i, params)[1])
      for i in range(count)
    )
    accuracy = 100 * hits / (count * self._batch)
    sampled = (
      {name: np.asarray(y) for name, y in part.items()}
      for part in (calibration, held_out)
    )
    return Snapshot(step, float(loss), accuracy, *sampled)

  def _run_batch(
    self, images: training.Images, i: int, params: PyTree
  ) -> tuple:
    """Returns loss, hits and activations of the i-th batch."""
    chosen = np.arange(i * self._batch, (i + 1) * self._batch)
    return self._run(params, training.select_batch(images, chosen))


MARGIN = 0.1
"""Room of a tile beyond the calibrated room, relative to that."""


class Layer(NamedTuple):
  """Bytes of one activation under every code."""

  name: str  # Name of the layer whose output it is.
  elements: int  # Number of elements.
  zeros: int  # Number of elements that are zero.
  code_bytes: dict[str, int]  # Bytes of all elements, by code.
  tiles: int  # Number of tiles of `OURS`.
  # Number of tiles of `OURS` with too little room; if there is one, the array
  # travels uncompressed.
  overflows: int
  # Error of rounding to bf16, relative to the activation's norm.
  bf16_error: float

  @property
  def sparsity(self) -> float:
    """Share of elements that are zero."""
    return self.zeros / self.elements

  def ratio(self, code: str) -> float:
    """Returns the bytes in float32 over the bytes of a code."""
    return 4 * self.elements / self.code_bytes[code]


class Measured(NamedTuple):
  """All activations of a network at one snapshot."""

  net: str  # Name of the network.
  step: int  # Number of training steps done.
  loss: float  # Loss of the held-out images of the snapshot, in nats.
  accuracy: float  # Accuracy on held-out images, in per cent.
  layers: list[Layer]  # Layers in the order of the forward pass.

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


def measure_snapshot(net: str, snapshot: Snapshot) -> Measured:
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
    codes.OURS: (calibration.astype(jnp.bfloat16), narrow, "spread"),
  }
  ours = {
    code: _measure_zero_value(*layout) for code, layout in layouts.items()
  }
  tiles, _, overflows = ours[codes.OURS]
  return Layer(
    name,
    x.size,
    int(x.size - np.count_nonzero(flat)),
    {
      "rle_nhwc": codes.run_length_bytes(flat),
      "rle_nchw": codes.run_length_bytes(first),
      codes.PUBLISHED_CODE: codes.zero_value_bytes(flat),
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


def check_largest(snapshot: Snapshot) -> tuple[str, int]:
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


def check_steps(steps: Sequence[int]) -> None:
  """Raises unless steps ascend, and a schedule can end at the last."""
  # The learning rate rises for a step, and falls for another.
  if list(steps) != sorted(set(steps)) or steps[-1] < 2:
    got = ", ".join(map(str, steps))
    raise ValueError(f"must ascend to 2 or more, got {got}.")


def measure_networks(
  nets: Sequence[str],
  *,
  data: str,
  image: int,
  steps: Sequence[int],
  batch: int,
  seed: int,
  console: rich.console.Console,
) -> list[Measured]:
  """Trains networks and measures their activations several times on the way."""
  images = training.load_color_images(data, image)
  measured = []
  with progress.Display(console, steps=steps[-1], runs=len(nets)) as display:
    for name in nets:
      net = models.make_network(
        name,
        image=image,
        classes=images.classes,
        width=training.NARROW_WIDTHS[name],
      )

      def on_snapshot(snapshot: Snapshot, name: str = name) -> None:
        measured.append(measure_snapshot(name, snapshot))
        if snapshot.step == steps[-1]:
          layer, payload_bytes = check_largest(snapshot)
          console.print(f"{name}: {layer} really takes {payload_bytes:,} bytes")

      step_ms = train_network(
        net,
        images,
        steps=steps,
        batch=batch,
        seed=seed,
        on_snapshot=on_snapshot,
        on_step=display.begin_run(name, seed),
      )
      display.end_run(name, seed, measured[-1].accuracy, step_ms)
  return measured
