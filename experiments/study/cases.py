"""Algorithms that the study compares, and the programs that train them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

import jaxmotion
from experiments.common import names
from experiments.train import cases
from experiments.train.mesh import Mesh
from experiments.train.optimizer import make_optimizer, make_settings
from jaxmotion import Scheme, codecs, presets
from jaxmotion.core import Array

EVERY = 8
"""Steps between two exchanges of local updates."""

_AXIS = "data"
_INT4 = codecs.feedback(codecs.uniform(bits=4))
_INT2 = codecs.feedback(codecs.uniform(bits=2))

Phases = tuple[tuple[int | None, int], ...]
"""Branch of the program, and how many steps take it, one after the other."""


class Algorithm(NamedTuple):
  """An algorithm of the study."""

  exchange: str  # Name of an exchange of `experiments.train`, or of `LOCAL`.
  # Whose base learning rate it takes: sgd, adamw, sign or muon. None for that
  # of the configuration.
  optimizer: str | None = None
  # Base outer learning rate of local updates, None for others.
  outer_rate: float | None = None
  # Branches that a run of so many steps takes.
  phases: Callable[[int], Phases] = lambda steps: ((0, steps),)
  warms_up: bool = False  # Whether the program depends on the number of steps.
  rounds: int = 1  # Number of sums in a step that wait for one another.
  # Number of parts that local updates send at different steps.
  fragments: int = 1


def _local_phases(steps: int) -> Phases:
  due = steps // EVERY
  return ((0, steps - due), (1, due))


def _onebit_phases(steps: int) -> Phases:
  freeze = max(1, 2 * (steps // 10))
  return ((1, freeze), (0, steps - freeze))


def _dgc_phases(steps: int) -> Phases:
  stage = max(1, steps // 10 // 4)
  return (*((b, stage) for b in (4, 3, 2, 1)), (0, steps - 4 * stage))


def _local(optimizer: str, outer_rate: float, exchange: str) -> Algorithm:
  return Algorithm(exchange, optimizer, outer_rate, _local_phases)


def _plain(exchange: str) -> Algorithm:
  return Algorithm(exchange, phases=lambda steps: ((None, steps),))


ALGORITHMS: dict[str, Algorithm] = {
  "fp32": _plain("fp32"),
  "diloco_int4": _local("adamw", 0.7, "diloco"),
  "power_sgd": Algorithm("power_sgd", rounds=2),
  "ef21_sgdm": Algorithm(
    "ef21_sgdm", "sgd", phases=lambda steps: ((1, 1), (0, steps - 1))
  ),
  "dgc": Algorithm("dgc", "sgd", phases=_dgc_phases, warms_up=True),
  "topk1_feedback": _plain("topk1_feedback"),
  "sign_feedback": _plain("sign_feedback"),
  "int4_feedback": _plain("int4_feedback"),
  "int8": _plain("int8"),
  "streaming_diloco": _local("adamw", 0.4, "streaming_diloco")._replace(
    fragments=4
  ),
  "sparse_loco": _local("adamw", 1.0, "sparse_loco"),
  "onebit_adam": Algorithm(
    "onebit_adam", "adamw", phases=_onebit_phases, warms_up=True
  ),
  "lion": Algorithm("lion", "sign"),
  "signum": Algorithm("signum", "sign"),
  "muloco": _local("muon", 0.7, "muloco"),
  "demo": Algorithm("demo", "sign"),
}
"""Algorithm by name; fp32 is the baseline of the others."""

LOCAL: dict[str, Callable[[optax.GradientTransformation, Any], Scheme]] = {
  "diloco": lambda inner, rate: presets.diloco(
    inner, every=EVERY, outer_rate=rate, codec=_INT4
  ),
  "streaming_diloco": lambda inner, rate: presets.streaming_diloco(
    inner, every=EVERY, fragments=4, outer_rate=rate
  ),
  # The preset `muloco` takes no optimizer whose learning rate is in its state.
  "muloco": lambda inner, rate: presets.diloco(
    inner, every=EVERY, outer_rate=rate, codec=_INT2
  ),
  "sparse_loco": lambda inner, rate: jaxmotion.local_updates(
    inner, presets.sparse_loco(_AXIS, rate), every=EVERY
  ),
}
"""Makes a scheme from the inner optimizer and the outer learning rate."""


def check_algorithm(name: str) -> None:
  """Raises unless there is an algorithm of this name."""
  names.check_name(name, ALGORITHMS, "`config.algorithms`")


def make_step(
  config: ConfigDict,
  loss_fn: Callable[..., Any],
  mesh: Mesh,
  name: str,
  outer_rate: float | None,
  steps: int,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
  """Returns `init` and `step` of an algorithm whose rate is in its state."""
  # One program so serves all learning rates, which `set_rates` sets.
  algorithm = ALGORITHMS[name]
  optimizer_name = algorithm.optimizer or config.optimizer
  fields = config.copy_and_resolve_references()
  fields.optimizer = optimizer_name
  fields.weight_decay = config.decays[optimizer_name]
  fields.steps = steps if algorithm.warms_up else 0

  def make(peak: Array, length: Array) -> optax.GradientTransformation:
    def schedule(count: Array) -> Array:
      return _take_cosine(count, peak, length)

    if optimizer_name == "muon":
      decay = fields.weight_decay
      return optax.contrib.muon(
        schedule, weight_decay=decay, adam_weight_decay=decay
      )
    settings = make_settings(fields, schedule)
    optimizer = optax.identity()  # Of presets that are optimizers themselves.
    if optimizer_name != "sign":
      optimizer = make_optimizer(fields, schedule)
    if algorithm.exchange in LOCAL:
      return optimizer
    return cases.exchange_with(mesh, algorithm.exchange, optimizer, settings)

  tx = optax.inject_hyperparams(make)(peak=1.0, length=1.0)
  if algorithm.exchange in LOCAL:
    scheme = LOCAL[algorithm.exchange](tx, outer_rate)
    return jaxmotion.make_train_step(loss_fn, scheme, mesh, mean_loss=False)
  return jaxmotion.make_train_step(loss_fn, tx, mesh)


def set_rates(state: Any, peak: float, length: int) -> Any:
  """Returns a state of `make_step` with this learning rate."""
  values = {"['peak']": peak, "['length']": float(length)}

  def set_leaf(path: Any, leaf: Array) -> Array:
    for key, value in values.items():
      if f".hyperparams{key}" in jax.tree_util.keystr(path):
        return jax.device_put(jnp.full_like(leaf, value), leaf.sharding)
    return leaf

  return jax.tree_util.tree_map_with_path(set_leaf, state)


def _take_cosine(count: Array, peak: Array, length: Array) -> Array:
  """Returns a rate that rises for a sixteenth of the steps, then falls."""
  rise = length / 16
  share = jnp.clip((count - rise) / (length - rise), 0.0, 1.0)
  fall = 0.5 * (1 + jnp.cos(jnp.pi * share))
  return peak * jnp.where(count < rise, count / rise, fall)
