"""The ways to move weights and gradients that a configuration can name."""

import dataclasses
from typing import NamedTuple

from ml_collections import ConfigDict

from jaxmotion import codecs, controllers


class Case(NamedTuple):
  """A way to move weights and gradients.

  Attributes:
    weights: the ladder of codecs, host to device.
    bits: of a weight on each rung.
    grads: codec, device to host.
    delta: whether weights travel as differences to what the device holds.
    control: what climbs the ladder: `awp`, `awp_tuned`, `budget`, or nothing.
  """

  weights: tuple[codecs.Codec, ...]
  bits: tuple[int, ...]
  grads: codecs.Codec = codecs.identity()
  delta: bool = False
  control: str | None = None


def _truncate(*widths: int) -> Case:
  ladder = tuple(codecs.truncate(bytes=n) for n in widths)
  return Case(ladder, tuple(8 * n for n in widths))


def _blocks(*widths: int) -> Case:
  ladder = tuple(codecs.uniform(bits=n) for n in widths)
  return Case(ladder, widths, grads=ladder[-1])


_INT4 = codecs.feedback(codecs.uniform(bits=4))

CASES = {
  "fp32": Case((codecs.identity(),), (32,)),
  # The paper's formats; its gradients return as they are.
  "truncate1": _truncate(1),
  "truncate2": _truncate(2),
  "truncate3": _truncate(3),
  "awp": _truncate(1, 2, 3, 4)._replace(control="awp"),
  "awp_tuned": _truncate(1, 2, 3, 4)._replace(control="awp_tuned"),
  # Ours: both ways packed.
  "int8": _blocks(8),
  "int8_delta": _blocks(8)._replace(delta=True),
  "int4_delta": _blocks(4)._replace(delta=True, grads=_INT4),
  "budget_delta": _blocks(2, 4, 8)._replace(delta=True, control="budget"),
}
"""Case by name; fp32 is what the others are compared with."""

_AWP = {
  "alexnet": controllers.awp_preset("alexnet"),
  "vgg_a": controllers.awp_preset("vgg"),
  "resnet34": controllers.awp_preset("resnet"),
}
# Of the error from 8 bits to 4: the steps of 127 levels to those of 7.
_GROWTH = 127 / 7


def get_case(name: str) -> Case:
  """The case of a name.

  Raises:
    ValueError: if there is none.
  """
  if name not in CASES:
    raise ValueError(
      f"`config.cases` must name some of {', '.join(CASES)}, got {name!r}."
    )
  return CASES[name]


def control_every(case: Case, config: ConfigDict) -> int:
  """After how many steps the controller of a case is asked again.

  Args:
    case: whose.
    config: with `budget_every`; AWP looks at every batch, as in the paper.
  """
  return config.budget_every if case.control == "budget" else 1


def make_controller(case: Case, config: ConfigDict) -> controllers.Controller:
  """What decides the levels of a case.

  AWP has the interval of the configuration, and the paper's threshold for the
  network; `awp_tuned` has the configuration's.

  Args:
    case: whose.
    config: with `model`, `awp_interval`, `awp_threshold`, `error_budget` and
      `budget_patience`.
  """
  interval = config.awp_interval
  match case.control:
    case "awp":
      return dataclasses.replace(_AWP[config.model], interval=interval)
    case "awp_tuned":
      return controllers.awp(threshold=config.awp_threshold, interval=interval)
    case "budget":
      return controllers.error_budget(
        budget=config.error_budget,
        levels=len(case.weights),
        growth=_GROWTH,
        patience=config.budget_patience,
      )
  return controllers.fixed(0)
