"""Measured steps, split into those for calibration and held-out ones."""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from experiments.hosts import jax_worker
from experiments.hosts.cases import EXCHANGES
from jaxmotion import codecs, perfmodel

_LAYERS = 3  # Hidden layers.
_IMAGE, _CLASSES = 784, 10


class Case(NamedTuple):
  """A training step of an MLP."""

  width: int  # Width of the hidden layers.
  batch: int  # Examples of each worker.
  exchange: str  # `none`, or the name of an exchange.

  @property
  def name(self) -> str:
    """The name of the step in rows."""
    return f"{self.exchange} width {self.width} batch {self.batch}"

  @property
  def widths(self) -> tuple[int, ...]:
    """The widths of all layers, the input's first."""
    return (_IMAGE, *[self.width] * _LAYERS, _CLASSES)

  @property
  def codec(self) -> codecs.Codec:
    """The codec of the exchange."""
    return EXCHANGES[self.exchange]


class Grid(NamedTuple):
  """Steps that are measured on one testbed."""

  # Steps without exchange, which calibrate predictions.
  known: tuple[Case, ...]
  held_out: tuple[Case, ...]  # Steps that predictions are compared with.

  def list_unseen(self, case: Case) -> str:
    """Returns the properties of a held-out case that no known case has."""
    widths, batches = ({c[i] for c in self.known} for i in (0, 1))
    unseen = {
      "width": case.width not in widths,
      "batch": case.batch not in batches,
      "exchange": case.exchange != "none",
    }
    return ", ".join(name for name, is_new in unseen.items() if is_new)


def parse_shape(text: str) -> tuple[int, int]:
  """Returns the width and the batch of a step, given as WIDTHxBATCH.

  >>> parse_shape("512x64")
  (512, 64)
  """
  width, _, batch = text.partition("x")
  try:
    shape = int(width), int(batch)
  except ValueError:
    shape = 0, 0
  if min(shape) < 1:
    raise ValueError(f"must be WIDTHxBATCH, such as 512x64, got {text!r}.")
  return shape


def make_grid(
  known_widths: Sequence[int],
  known_batches: Sequence[int],
  shapes: Sequence[tuple[int, int]],
  exchanges: Sequence[str],
) -> Grid:
  """Returns the cases of a testbed."""
  known = tuple(
    Case(width, batch, "none")
    for width, batch in itertools.product(known_widths, known_batches)
  )
  others = [Case(*shape, name) for shape in shapes for name in exchanges]
  return Grid(known, tuple(case for case in others if case not in known))


@functools.cache
def trace_case(case: Case) -> perfmodel.StepCost:
  """Returns the cost of what each worker of a case computes."""
  params = jax.eval_shape(lambda: jax_worker.make_params(case.widths))
  batch = {
    "x": jax.ShapeDtypeStruct((case.batch, case.widths[0]), np.float32),
    "y": jax.ShapeDtypeStruct((case.batch,), np.int32),
  }
  return perfmodel.trace_step(jax_worker.loss_fn, params, (batch,))
