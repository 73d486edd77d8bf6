"""The steps that are measured, and which of them a prediction may know."""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from experiments.hosts import jax_worker
from experiments.train.cases import get_exchange
from jaxmotion import codecs, perfmodel

_LAYERS = 3  # Hidden ones.
_IMAGE, _CLASSES = 784, 10


class Case(NamedTuple):
  """A training step of an MLP.

  Attributes:
    width: of its hidden layers.
    batch: examples of each worker.
    exchange: `none`, or the name of an exchange.
  """

  width: int
  batch: int
  exchange: str

  @property
  def name(self) -> str:
    """For rows."""
    return f"{self.exchange} width {self.width} batch {self.batch}"

  @property
  def widths(self) -> tuple[int, ...]:
    """Of all layers, the input's first."""
    return (_IMAGE, *[self.width] * _LAYERS, _CLASSES)

  @property
  def codec(self) -> codecs.Codec:
    """Of its exchange."""
    return get_exchange(self.exchange)


class Grid(NamedTuple):
  """What is measured on one testbed.

  Attributes:
    known: steps without exchange that predictions are calibrated on.
    held_out: steps that no prediction knows.
  """

  known: tuple[Case, ...]
  held_out: tuple[Case, ...]

  def held(self, case: Case) -> str:
    """What of a held-out case the calibration has not seen."""
    widths, batches = ({c[i] for c in self.known} for i in (0, 1))
    unseen = {
      "width": case.width not in widths,
      "batch": case.batch not in batches,
      "exchange": case.exchange != "none",
    }
    return ", ".join(name for name, is_new in unseen.items() if is_new)


def make_grid(
  known_widths: Sequence[int],
  known_batches: Sequence[int],
  shapes: Sequence[tuple[int, int]],
  exchanges: Sequence[str],
) -> Grid:
  """Makes the cases of a testbed.

  Args:
    known_widths: of the steps without exchange that calibrate, two at least.
    known_batches: of those.
    shapes: widths and batches of the held-out steps.
    exchanges: of those.
  """
  known = itertools.product(known_widths, known_batches, ["none"])
  held = [Case(*shape, name) for shape in shapes for name in exchanges]
  kept = tuple(Case(*case) for case in known)
  return Grid(kept, tuple(case for case in held if case not in kept))


@functools.cache
def work(case: Case) -> perfmodel.StepCost:
  """What each worker of a case computes."""
  params = jax.eval_shape(lambda: jax_worker.make_params(case.widths))
  batch = {
    "x": jax.ShapeDtypeStruct((case.batch, case.widths[0]), np.float32),
    "y": jax.ShapeDtypeStruct((case.batch,), np.int32),
  }
  return perfmodel.trace_step(jax_worker.loss_fn, params, (batch,))
