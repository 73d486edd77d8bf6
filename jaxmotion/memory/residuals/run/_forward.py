"""The forward pass of a function whose residuals are kept as a split says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, assert_replicated, varying_axes
from jaxmotion.memory._memory_kind import to_host
from jaxmotion.memory.residuals.choose import (
  Diagnostics,
  SavedResidual,
  Selection,
  full,
)
from jaxmotion.program import Operand, Step, Value, evaluate, read_operand

Words = list[Array]
Env = dict[Value, Any]


def plain(
  split: Selection, inputs: Sequence[Array]
) -> tuple[list[Any], Diagnostics]:
  """Returns the outputs and notes of nothing."""
  env = environment(split, zip(split.joint.inputs, inputs, strict=True))
  ends = _ends(split)
  evaluate(split.joint.order.leading_to(ends, env), env)
  zero = jnp.zeros((), jnp.float32)
  fills = {residual.name: zero for _, residual in split.measured()}
  return _results(split, env, 0, fills)


def forward(
  split: Selection, inputs: Sequence[Array], *, transfer: bool = True
) -> tuple[tuple[list[Any], Diagnostics], list[Words]]:
  """Returns the outputs, notes on them, and what is kept.

  A residual is encoded after its last use and before what comes next, or XLA
  would keep it until there is time. What goes to the host has until the next
  one is encoded to get there, the last until there is a result; without
  `transfer`
  the caller sends it.
  """
  env = environment(split, zip(split.joint.inputs, inputs, strict=True))
  ends = [*_ends(split), *(k.value for k in split.kept)]
  steps = split.joint.order.leading_to(ends, env)
  encoded: dict[Value, Words] = {}
  dropped: list[Array] = []
  leaving: list[Words] = []

  def wait(token: Value | None) -> None:
    """Lets a value wait for what is on its way."""
    if leaving and token is not None:
      # Later uses are of the array itself: a loop that stacks it has no place
      # on the host for what a barrier returns.
      _, env[token] = together(leaving, env[token])
      leaving.clear()

  def encode(due: Sequence[SavedResidual], token: Value | None) -> None:
    words = {}
    for value, residual in due:
      words[value], lost = residual.encode(env[value])
      dropped.extend([] if lost is None else [lost])
    wait(token)
    held = list(words.values())
    if token is not None:
      held, env[token] = together(held, env[token])
    encoded.update(zip(words, held, strict=True))
    for value, residual in due:
      if residual.on_host and transfer:
        encoded[value] = to_host(encoded[value])
        leaving.append(encoded[value])

  waiting = evaluate_keeping(steps, env, split.kept, encode)
  results = (v for v in split.joint.outputs if isinstance(v, Value))
  end = next(results, None)
  if waiting:
    encode(waiting, end)
  wait(end)
  overflows = sum((lost > 0).astype(jnp.int32) for lost in dropped)
  fills = {r.name: full(env[v]) for v, r in split.measured()}
  words = [encoded[k.value] for k in split.kept]
  return _results(split, env, overflows, fills), words


def together(held: Any, token: Array) -> tuple[Any, Array]:
  """Returns both, neither before the other."""
  return tied((held, token))


def tied(before: Any) -> Any:
  """Returns all arrays, none before another."""
  return jax.tree.map(_typed_as, lax.optimization_barrier(before), before)


def _typed_as(x: Array, like: Array) -> Array:
  """The barrier types all as varying where any is."""
  extra = varying_axes(x) - varying_axes(like)
  return assert_replicated(x, tuple(sorted(extra, key=str))) if extra else x


def evaluate_keeping(
  steps: Sequence[Step],
  env: Env,
  kept: Sequence[SavedResidual],
  encode: Callable[[Sequence[SavedResidual], Value | None], None],
) -> list[SavedResidual]:
  """Runs steps, and has each residual encoded after its last use.

  Returns:
    Those that are still to be encoded, as nothing comes after them.
  """
  due = _due(kept, steps)
  encode(due.pop(-1, []), None)
  waiting: list[SavedResidual] = []
  for i, step in enumerate(steps):
    evaluate([step], env)
    group = [*waiting, *due.get(i, ())]
    # What nothing else is made of waits for the next result.
    waiting = [k for k in group if k.value is step.outs[0]]
    if len(group) > len(waiting):
      encode([k for k in group if k not in waiting], step.outs[0])
  return waiting


def _due(
  kept: Iterable[SavedResidual], steps: Sequence[Step]
) -> dict[int, list[SavedResidual]]:
  """By the step after which they are encoded; -1: before all."""
  last = {
    v: i for i, step in enumerate(steps) for v in (*step.reads, *step.outs)
  }
  due: dict[int, list[SavedResidual]] = {}
  for keep in kept:
    due.setdefault(last.get(keep.value, -1), []).append(keep)
  return due


def environment(split: Selection, pairs: Iterable[tuple[Value, Any]]) -> Env:
  """Returns what is there when a pass begins."""
  return {**split.joint.program.constants, **dict(pairs)}


def _ends(split: Selection) -> list[Operand]:
  return [*split.joint.outputs, *jax.tree.leaves(split.joint.notes)]


def _results(
  split: Selection, env: Env, overflows: Any, fills: dict[str, Array]
) -> tuple[list[Any], Diagnostics]:
  inner = jax.tree.map(lambda v: read_operand(env, v), split.joint.notes)
  own = Diagnostics(jnp.asarray(overflows, jnp.int32), fills)
  return [read_operand(env, v) for v in split.joint.outputs], inner.add(own)
