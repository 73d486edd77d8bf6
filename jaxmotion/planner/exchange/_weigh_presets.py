"""Presets that exchange in every step, as algorithms beside a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import optax

from jaxmotion import codecs, perfmodel, presets
from jaxmotion.core import PyTree
from jaxmotion.planner.exchange import _algorithm_choice, _problem
from jaxmotion.transforms.extend import find_exchanges, trace_state


def refuse_moments(problem: _problem.ExchangeProblem) -> str:
  """Says that the optimizer has a momentum as well, or nothing."""
  # Moments of 8 bits are a quarter of the parameters; counters are nothing.
  if (
    problem.step_cost.state_bytes < _algorithm_choice.params_bytes(problem) / 8
  ):
    return ""
  return (
    "It has the momentum inside and assumes SGD without one after it, but "
    "`optimizer` keeps moments."
  )


def refuse_lookups(problem: _problem.ExchangeProblem, *, why: str) -> str:
  """Says that the loss looks rows of a table up, or nothing."""
  tables = problem.step_cost.uses.looked_up
  if not tables:
    return ""
  return f"{why}, but the loss only looks up rows of `{tables[0]}`."


def refuse_stacks(problem: _problem.ExchangeProblem) -> str:
  """Says that the loss stacks matrices in one array, or nothing."""
  named = jax.tree.leaves_with_path(problem.step_cost.params)
  deep = {
    jax.tree_util.keystr(p, simple=True, separator="/")
    for p, a in named
    if a.ndim > 2
  }
  stacks = [path for path in problem.step_cost.uses.stacked if path in deep]
  if not stacks:
    return ""
  return (
    "It assumes that an array is one matrix of low rank, but the loss takes "
    f"`{stacks[0]}` apart, a stack of several."
  )


def refuse_no_matrices(problem: _problem.ExchangeProblem) -> str:
  """Says that no parameter is a matrix, or nothing."""
  leaves = jax.tree.leaves(problem.step_cost.params)
  if any(a.ndim == 2 and min(a.shape) > 1 for a in leaves):
    return ""
  return "It assumes matrices, which it orthogonalizes, and `params` has none."


def _refuse_frozen(problem: _problem.ExchangeProblem) -> str:
  """Says that some second moments would stay zero, or nothing."""
  why = (
    "It assumes that every element has a gradient before its second moments "
    "freeze"
  )
  return refuse_lookups(problem, why=why)


class _Preset(NamedTuple):
  """A preset, and what it changes about training."""

  make: Callable[..., optax.GradientTransformation]
  note: str
  refuse: Callable[[_problem.ExchangeProblem], str] = lambda problem: ""
  # Learning rates change no bytes.
  rates: tuple[float, ...] = ()


_OPTIMIZER = "Replaces the optimizer; its learning rate has to be tuned."
_MOMENTUM = "Has the momentum inside: follow it by SGD without momentum."
_RATE = (1e-3,)
_PRESETS = (
  _Preset(
    presets.power_sgd,
    "Sends factors of rank 4, after 1000 steps at full precision.",
    refuse_stacks,
  ),
  _Preset(presets.dgc, _MOMENTUM, refuse_moments),
  _Preset(presets.ef21_sgdm, _MOMENTUM, refuse_moments),
  _Preset(
    presets.onebit_adam,
    "Replaces the optimizer by Adam, whose second moments freeze.",
    _refuse_frozen,
    rates=_RATE,
  ),
  _Preset(presets.lion, _OPTIMIZER, rates=_RATE),
  _Preset(presets.signum, _OPTIMIZER, rates=_RATE),
  _Preset(presets.demo, _OPTIMIZER, rates=_RATE),
  _Preset(
    presets.sparse_loco,
    f"{_OPTIMIZER} It is meant as the outer one of `local_updates`.",
    rates=_RATE,
  ),
)


def _list_phases(state: PyTree) -> Iterator[tuple[codecs.Codec, str | None]]:
  """Yields the codec and the method of each phase of a preset."""
  for exchange in find_exchanges(state):
    for codec in exchange.made_for.codecs:
      yield codec, exchange.made_for.method


def weigh_presets(
  problem: _problem.ExchangeProblem, uncompressed: perfmodel.StepPrediction
) -> Iterator[_algorithm_choice.AlgorithmChoice]:
  """Yields the presets that exchange in every step."""
  mesh = _algorithm_choice.make_workers_mesh(problem)
  for preset in _PRESETS:
    name = f"presets.{preset.make.__name__}({problem.mesh_axis!r}, ...)"
    if refusal := preset.refuse(problem):
      yield _algorithm_choice.refuse_choice(name, refusal)
      continue
    try:
      tx = preset.make(problem.mesh_axis, *preset.rates)
      state = trace_state(tx, problem.distinct_leaves, mesh, mesh.axis_names)
      steps = [
        problem.predict_step(codec, method)
        for codec, method in _list_phases(state)
      ]
      # Phases that send more are a warm-up.
      step = min(steps, key=lambda s: s.wire_bytes)
    except (TypeError, ValueError) as error:
      yield _algorithm_choice.refuse_choice(name, f"It refuses: {error}")
      continue
    if step.wire_bytes >= uncompressed.wire_bytes:
      note = "It sends no fewer bytes: the tensors are small, or no matrices."
      yield _algorithm_choice.refuse_choice(name, note)
    else:
      choice = _algorithm_choice.AlgorithmChoice(
        name, step.total_s, step.wire_bytes, preset.note
      )
      yield _algorithm_choice.offer_choice(problem, choice, step.memory_bytes)
