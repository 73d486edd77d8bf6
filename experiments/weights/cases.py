"""Codecs of weights and gradients that a configuration can name."""

import dataclasses
from typing import NamedTuple

from ml_collections import ConfigDict

from experiments.common import names
from jaxmotion import codecs, controllers


class Case(NamedTuple):
  """Codecs of weights and gradients, and the controller of the weights'."""

  # Codecs from host to device, one for each level.
  weights: tuple[codecs.Codec, ...]
  bits: tuple[int, ...]  # Bits of a weight at each level.
  grads: codecs.Codec = codecs.identity()  # Codec from device to host.
  # Whether weights travel as differences to what the device holds.
  delta: bool = False
  # Controller of the level: `awp`, `awp_tuned`, `budget`, or None.
  control: str | None = None


def _truncate_case(*widths: int) -> Case:
  levels = tuple(codecs.truncate(bytes=n) for n in widths)
  return Case(levels, tuple(8 * n for n in widths))


def _uniform_case(*widths: int) -> Case:
  levels = tuple(codecs.uniform(bits=n) for n in widths)
  return Case(levels, widths, grads=levels[-1])


_INT4 = codecs.feedback(codecs.uniform(bits=4))

CASES = {
  "fp32": Case((codecs.identity(),), (32,)),
  # The paper's formats; its gradients return uncompressed.
  "truncate1": _truncate_case(1),
  "truncate2": _truncate_case(2),
  "truncate3": _truncate_case(3),
  "awp": _truncate_case(1, 2, 3, 4)._replace(control="awp"),
  "awp_tuned": _truncate_case(1, 2, 3, 4)._replace(control="awp_tuned"),
  # Ours: both directions are compressed.
  "int8": _uniform_case(8),
  "int8_delta": _uniform_case(8)._replace(delta=True),
  "int4_delta": _uniform_case(4)._replace(delta=True, grads=_INT4),
  "budget_delta": _uniform_case(2, 4, 8)._replace(delta=True, control="budget"),
}
"""Case by name; fp32 is the baseline of the others."""

# The constants of the paper.
_AWP = {
  "alexnet": controllers.awp(threshold=-5e-2, interval=4000),
  "vgg_a": controllers.awp(threshold=-2e-3, interval=4000),
  "resnet34": controllers.awp(threshold=-2e-5, interval=2000),
}
# Growth of the error from 8 bits to 4: steps of 127 levels against those of 7.
_GROWTH = 127 / 7


def get_case(name: str) -> Case:
  """Returns the case of a name."""
  names.check_name(name, CASES, "`config.cases`")
  return CASES[name]


def control_interval(case: Case, config: ConfigDict) -> int:
  """Returns the number of steps between two updates of a case's controller."""
  return config.budget_every if case.control == "budget" else 1


def make_controller(case: Case, config: ConfigDict) -> controllers.Controller:
  """Returns the controller of a case's levels."""
  # AWP has the interval of the configuration and the paper's threshold for the
  # network; `awp_tuned` has the configuration's threshold.
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
