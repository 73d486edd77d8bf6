"""Decoder-only transformer on bytes of text, described without a framework.

Parameters, batches and learning rates are NumPy arrays, so that two frameworks
train the same model.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.data import text
from experiments.models import gpt
from experiments.models.network import Network, Stage

WEIGHT_DECAY = 0.01
"""Decay of AdamW, in units of the learning rate."""

Batch = tuple[np.ndarray, np.ndarray]
"""Bytes and the bytes that follow them, each int32 `(windows, length)`."""


class Shape(NamedTuple):
  """Sizes of the model, of its batches and of the text that scores it."""

  layers: int = 3
  channels: int = 512
  heads: int = 8
  length: int = 128  # Bytes of a window.
  batch: int = 4  # Windows of a step, over all hosts.
  held_out: int = 64  # Windows of held-out text.


class Decoder:
  """Model, batches and held-out windows of one shape."""

  def __init__(self, shape: Shape, *, stacked: bool = False):
    """Makes a model; if `stacked`, its blocks run in a loop."""
    self.shape = shape
    network = gpt.gpt(
      layers=shape.layers,
      length=shape.length,
      heads=shape.heads,
      width=shape.channels / 1024,
    )
    self.network = network if stacked else _unroll_stages(network)

  @functools.cached_property
  def data(self) -> text.TextData:
    """The sources of the standard library; a tenth of the files is held out."""
    return text.read_sources(None, 1 << 30, 1 << 30)

  def describe(self) -> str:
    """Returns the model and the data as text."""
    sizes = ", ".join(f"{k} {v}" for k, v in self.shape._asdict().items())
    digest = text.corpus_sha256(self.data)
    return f"{self.network.size} parameters; {sizes}; text {digest[:16]}"

  def make_params(self, seed: int) -> Any:
    """Returns initial parameters, a tree of float32 arrays."""
    return jax.tree.map(np.array, self.network.init(jax.random.key(seed)))

  def make_batch(self, seed: int, step: int, rank: int, hosts: int) -> Batch:
    """Returns a host's part of the batch of a step, counted from 0."""
    shape = self.shape
    windows = text.draw_windows(
      self.data.train, shape.length, shape.batch, seed, step
    )
    return _split_windows(windows[rank::hosts])

  def held_out(self, rank: int, hosts: int) -> Batch:
    """Returns a host's part of the held-out windows."""
    windows = text.cut_windows(self.data.test, self.shape.length)
    chosen = np.linspace(0, len(windows) - 1, self.shape.held_out).astype(int)
    return _split_windows(windows[chosen[rank::hosts]])


def list_rates(peak: float, steps: int) -> np.ndarray:
  """Returns the learning rate of each step: a short rise, then a cosine.

  >>> list_rates(1.0, 4).round(2)
  array([1.  , 0.85, 0.5 , 0.15], dtype=float32)
  """
  rise = max(1, steps // 16)
  count = np.arange(steps)
  share = np.clip((count + 1 - rise) / (steps + 1 - rise), 0.0, 1.0)
  fall = 0.5 * (1 + np.cos(np.pi * share))
  rates = peak * np.minimum((count + 1) / rise, fall)
  return rates.astype(np.float32)


def _split_windows(windows: np.ndarray) -> Batch:
  return windows[:, :-1], windows[:, 1:]


def _unroll_stages(network: Network) -> Network:
  """Makes each repeat of a block a stage with arrays of its own."""
  # Codecs then see matrices, as those of PyTorch do, and not stacks of them.
  stages = [
    Stage(f"{stage.name}{i}" if stage.repeats > 1 else stage.name, stage.block)
    for stage in network.stages
    for i in range(stage.repeats)
  ]
  return dataclasses.replace(network, stages=tuple(stages))
