"""Comparison of a plan with other algorithms, on the same platform."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import optax
from jax.sharding import AbstractMesh

from jaxmotion import presets
from jaxmotion.codecs import Codec
from jaxmotion.core import AxisName, check_instance
from jaxmotion.perfmodel import StepPrediction
from jaxmotion.planner.exchange._algorithm_choice import (
  AlgorithmChoice,
  AlgorithmTable,
  exchange_rarely,
  params_bytes,
  refuse_memory,
  unexchanged_seconds,
)
from jaxmotion.planner.exchange._plan import ExchangePlan
from jaxmotion.planner.exchange._problem import ExchangeProblem
from jaxmotion.transforms.extend import (
  ExchangeOptions,
  Options,
  trace_state,
)

_RATE = 1e-3  # Learning rates change no bytes.


class _Preset(NamedTuple):
  """A preset: how it is written, and what it changes about training."""

  name: str
  make: Callable[[str, AxisName | None], optax.GradientTransformation]
  note: str


_OPTIMIZER = "Replaces the optimizer; its learning rate has to be tuned."
_PRESETS = (
  _Preset(
    "power_sgd",
    lambda axis, local: presets.power_sgd(axis, local_axis=local),
    "Sends factors of rank 4, after 1000 steps at full precision.",
  ),
  _Preset(
    "dgc",
    lambda axis, local: presets.dgc(axis, local_axis=local),
    "Has the momentum inside: follow it by SGD without momentum.",
  ),
  _Preset(
    "ef21_sgdm",
    lambda axis, local: presets.ef21_sgdm(axis, local_axis=local),
    "Has the momentum inside: follow it by SGD without momentum.",
  ),
  _Preset(
    "onebit_adam",
    lambda axis, local: presets.onebit_adam(axis, _RATE, local_axis=local),
    "Replaces the optimizer by Adam, whose second moments freeze.",
  ),
  _Preset(
    "lion",
    lambda axis, local: presets.lion(axis, _RATE, local_axis=local),
    _OPTIMIZER,
  ),
  _Preset(
    "signum",
    lambda axis, local: presets.signum(axis, _RATE, local_axis=local),
    _OPTIMIZER,
  ),
  _Preset(
    "demo",
    lambda axis, local: presets.demo(axis, _RATE, local_axis=local),
    _OPTIMIZER,
  ),
)


def compare_algorithms(plan: ExchangePlan) -> AlgorithmTable:
  """Predicts the steps of other algorithms for the problem of a plan.

  They are the plan itself, its exchange one step late, exchanges every few
  steps, and the presets. An algorithm is not offered if it needs more memory
  than the device has, if the parameters are nothing that it takes, or if it
  sends no fewer bytes. Their errors are not weighed: no bound on one step tells
  what they do to a loss.

  Args:
    plan: what `advise` returned.

  Returns:
    The algorithms, the fastest step first.

  Raises:
    TypeError: `plan` is no plan.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from jaxmotion import perfmodel, planner
    >>> w = jax.ShapeDtypeStruct((2048, 2048), "float32")
    >>> x = jax.ShapeDtypeStruct((64, 2048), "float32")
    >>> ethernet = perfmodel.builtin_platform("ethernet_1gbit")
    >>> plan = planner.advise(lambda w, x: jnp.sum(x @ w), w, (x,), ethernet)
    >>> fastest = compare_algorithms(plan)[0]
    >>> fastest.name, fastest.step_s < plan.step.total_s / 10
    ('local_updates(..., every=64)', True)
  """
  check_instance("plan", plan, ExchangePlan, "what `advise` returned")
  problem = plan.problem
  choices = [
    AlgorithmChoice(
      f"exchange({problem.mesh_axis!r}, plan.codec)",
      plan.step.total_s,
      plan.step.wire_bytes,
      "The plan: an exchange in every step.",
    ),
    _delay_plan(plan),
    exchange_rarely(problem, plan.step),
    *_list_presets(problem, plan.uncompressed),
  ]
  choices.sort(key=lambda c: float("inf") if c.step_s is None else c.step_s)
  return AlgorithmTable(choices)


def _list_phases(
  exchanges: list[Options],
) -> Iterator[tuple[Codec, str | None]]:
  """Yields the codec and the method of each phase of a preset."""
  for options in exchanges:
    assert isinstance(options, ExchangeOptions)
    codec = options.codec
    for own in codec if isinstance(codec, tuple) else (codec,):
      yield own, options.method


def _delay_plan(plan: ExchangePlan) -> AlgorithmChoice:
  step = plan.step
  name = "data_parallel(..., delay=1)"
  needed = step.memory_bytes + params_bytes(plan.problem)
  if refusal := refuse_memory(plan.problem, needed):
    return AlgorithmChoice(name, None, None, refusal)
  coding_s = step.encode_s + step.decode_s
  seconds = max(unexchanged_seconds(step) + coding_s, step.link_s + coding_s)
  note = "The plan's exchange, of gradients that are one step old."
  return AlgorithmChoice(name, seconds, step.wire_bytes, note)


def _list_presets(
  problem: ExchangeProblem, uncompressed: StepPrediction
) -> Iterator[AlgorithmChoice]:
  axis, local = problem.mesh_axis, problem.local_axis
  axes = (axis,) if local is None else (axis, local)
  mesh = AbstractMesh(
    tuple(problem.platform.axis(name).workers for name in axes), axes
  )
  workers = axis if local is None else axes
  for preset in _PRESETS:
    name = f"presets.{preset.name}({axis!r}, ...)"
    try:
      tx = preset.make(axis, local)
      traced = trace_state(tx, problem.step_cost.params, mesh, workers)
      steps = [
        problem.predict_step(codec, method)
        for codec, method in _list_phases(traced.exchanges)
      ]
      # Phases that send more are a warm-up.
      step = min(steps, key=lambda s: s.wire_bytes)
    except (TypeError, ValueError) as error:
      yield AlgorithmChoice(name, None, None, f"It refuses: {error}")
      continue
    if refusal := refuse_memory(problem, step.memory_bytes):
      yield AlgorithmChoice(name, None, None, refusal)
    elif step.wire_bytes >= uncompressed.wire_bytes:
      note = "It sends no fewer bytes: the tensors are small, or no matrices."
      yield AlgorithmChoice(name, None, None, note)
    else:
      yield AlgorithmChoice(name, step.total_s, step.wire_bytes, preset.note)
