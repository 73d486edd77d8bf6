"""Forward pass that encodes and saves the selected residuals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import core, program
from jaxmotion.core import Array
from jaxmotion.memory import _memory_kind
from jaxmotion.memory.residuals import choose
from jaxmotion.memory.residuals.run import _delay

Env = dict[program.Value, Any]


def evaluate_outputs(
  selection: choose.Selection, inputs: Sequence[Array]
) -> tuple[list[Any], choose.Diagnostics]:
  """Evaluates the function without saving anything."""
  # Returns the outputs, and diagnostics of zeros in the structure of
  # `forward`'s.
  joint = selection.joint
  env = make_env(selection, zip(joint.inputs, inputs, strict=True))
  ends = _output_values(selection)
  program.evaluate(joint.order.leading_to(ends, env, joint.effects), env)
  zero = jnp.zeros((), jnp.float32)
  fills = {residual.name: zero for _, residual in selection.measured}
  return _collect_results(selection, env, 0, fills)


def forward(
  selection: choose.Selection, inputs: Sequence[Array], *, transfer: bool = True
) -> tuple[tuple[list[Any], choose.Diagnostics], list[choose.Buffers]]:
  """Evaluates the function and saves the selected residuals."""
  # Two orders are held by barriers:
  # * A residual is encoded after its last use and before the next step. Left to
  #   itself, XLA would keep the original until it has time to encode, which is
  #   in the backward pass.
  # * Buffers that go to the host must have arrived when the next residual is
  #   encoded, the last ones when there is an output. Left to itself, XLA would
  #   send them when it has time, which is in the backward pass, too.
  # Returns the outputs and the diagnostics, and the encoded buffers of each
  # saved residual.
  if selection.plain is not None:
    return _keep_plain(selection, selection.plain, inputs)
  joint = selection.joint
  env = make_env(selection, zip(joint.inputs, inputs, strict=True))
  ends = [*_output_values(selection), *(s.value for s in selection.saved)]
  steps = joint.order.leading_to(ends, env, joint.effects)
  read_early = {v.source for s in steps if ends_fusion(s) for v in s.reads}
  results = {v.source for v in joint.outputs if isinstance(v, program.Value)}
  free = _delay.find_free_to_delay(selection)
  encoded: dict[program.Value, choose.Buffers] = {}
  overflow_counts: list[Array] = []
  in_transit: list[choose.Buffers] = []

  def is_late(value: program.Value) -> bool:
    """Says whether a compiler may compute a saved array in the backward
    pass."""
    # It then keeps what the array follows from. Results of expensive steps are
    # computed once, and what an expensive step reads is there when that runs.
    written = value.source
    maker = joint.order.maker(written)
    is_cheap = maker is not None and not program.is_expensive(maker.eqn)
    is_read = written in read_early or written in results
    return is_cheap and not is_read and value not in free

  def wait_for_transfers(token: program.Value | None) -> None:
    """Makes `env[token]` depend on the pending host transfers."""
    # The buffers themselves stay as they were before the barrier: a loop that
    # stacks them in host memory must stack what was sent, or XLA finds no place
    # on the host for the stack.
    if in_transit and token is not None:
      _, env[token] = tie_to_token(in_transit, env[token])
      in_transit.clear()

  def encode(
    due: Sequence[choose.SavedResidual], token: program.Value | None
  ) -> None:
    """Encodes residuals before anything reads the token."""
    buffers = {}
    for value, residual in due:
      buffers[value], overflow = residual.encode(env[value])
      overflow_counts.extend([] if overflow is None else [overflow])
    wait_for_transfers(token)
    encoded.update(buffers)
    made = [v for v, r in due if r.is_computed or r.on_host or is_late(v)]
    if token is not None:
      if made:
        tied = [buffers[v] for v in made]
        tied, env[token] = tie_to_token(tied, env[token])
        encoded.update(zip(made, tied, strict=True))
      for value in (v for v in buffers if v not in made and v not in free):
        # Nothing is to be done for the array, and a barrier behind the next
        # step's result would keep what reads that from writing over it. But
        # the array waits for a reduction: a compiler could put off the sum of
        # a loss to the end of the backward pass.
        if value.nbytes > _delay.SMALL * token.nbytes:
          tied, _ = tie_to_token(buffers[value], env[token])
          encoded[value] = tied
    for value, residual in due:
      if residual.on_host and transfer:
        encoded[value] = _memory_kind.to_host(encoded[value])
        in_transit.append(encoded[value])

  waiting = evaluate_and_encode(steps, env, selection.saved, encode)
  last_token = next(
    (v for v in joint.outputs if isinstance(v, program.Value)), None
  )
  if waiting:
    encode(waiting, last_token)
  wait_for_transfers(last_token)
  overflows = sum((n > 0).astype(jnp.int32) for n in overflow_counts)
  fills = {
    r.name: choose.fullest_tile_share(env[v]) for v, r in selection.measured
  }
  buffers = [encoded[s.value] for s in selection.saved]
  return _collect_results(selection, env, overflows, fills), buffers


def _keep_plain(
  selection: choose.Selection,
  kept: Sequence[program.Value],
  inputs: Sequence[Array],
) -> tuple[tuple[list[Any], choose.Diagnostics], list[choose.Buffers]]:
  """Evaluates the function and keeps values as they are."""
  joint = selection.joint
  env = make_env(selection, zip(joint.inputs, inputs, strict=True))
  ends = [*_output_values(selection), *kept]
  program.evaluate(joint.order.leading_to(ends, env, joint.effects), env)
  buffers = [[choose.differentiate_once(env[v])] for v in kept]
  return _collect_results(selection, env, 0, {}), buffers


def list_gates(selection: choose.Selection, outs: Sequence[Any]) -> list[Array]:
  """Returns the outputs that a backward pass should wait for: small ones."""
  # A compiler could put off the sum of a loss to the end of the backward pass.
  most = max((s.value.nbytes for s in selection.saved), default=0)
  pairs = zip(selection.joint.outputs, outs, strict=True)
  return [
    x
    for v, x in pairs
    if isinstance(v, program.Value) and _delay.SMALL * v.nbytes < most
  ]


def tie_to_token(arrays: Any, token: Array) -> tuple[Any, Array]:
  """Returns a tree of arrays and a token, neither available before the
  other."""
  # Whatever reads the returned token runs after the arrays exist, and whatever
  # reads the returned arrays runs after the token exists.
  return tie_arrays((arrays, token))


def tie_arrays(tree: Any) -> Any:
  """Returns all arrays of a tree, none available before the others."""
  return jax.tree.map(_restore_varying, lax.optimization_barrier(tree), tree)


def mask_words(buffers: choose.Buffers, mask: Array) -> choose.Buffers:
  """Combines words with a zero, so that they are read after that exists."""
  return jax.tree.map(lambda words: words | mask.astype(words.dtype), buffers)


def _restore_varying(x: Array, like: Array) -> Array:
  """Types an array as varying over the mesh axes of another."""
  # A barrier types all of its results as varying where any operand is.
  extra = core.varying_axes(x) - core.varying_axes(like)
  return (
    core.assert_replicated(x, tuple(sorted(extra, key=str))) if extra else x
  )


def evaluate_and_encode(
  steps: Sequence[program.Step],
  env: Env,
  saved: Sequence[choose.SavedResidual],
  encode: Callable[
    [Sequence[choose.SavedResidual], program.Value | None], None
  ],
) -> list[choose.SavedResidual]:
  """Runs steps and encodes each residual soon after its last use."""
  # What waits for the encoding is the result of a step whose result is written
  # to memory anyway. The result of a cheap step would be written for the
  # barrier alone: float32 scores of an attention that the exponential reads at
  # once.
  due = _group_by_last_use(saved, steps)
  encode(due.pop(-1, []), None)
  waiting: list[choose.SavedResidual] = []
  for i, step in enumerate(steps):
    program.evaluate([step], env)
    waiting += due.get(i, ())
    if waiting and is_written(step):
      # A residual that is itself the result cannot be tied to it.
      made = step.outs[0]
      group = [s for s in waiting if s.value is not made]
      waiting = [s for s in waiting if s.value is made]
      if group:
        encode(group, made)
  return waiting


def ends_fusion(step: program.Step) -> bool:
  """Says whether a compiler writes what a step reads and what it makes."""
  return program.is_expensive(step.eqn) and step.name not in program.REDUCTIONS


def is_written(step: program.Step) -> bool:
  """Says whether a compiler writes a step's first result to memory."""
  # Random bits are computed by what reads them.
  if not step.outs or not hasattr(step.outs[0].aval, "shape"):
    return False
  return (
    program.is_expensive(step.eqn)
    and step.name not in program.RANDOM | program.VIEWS
  )


def _group_by_last_use(
  saved: Iterable[choose.SavedResidual], steps: Sequence[program.Step]
) -> dict[int, list[choose.SavedResidual]]:
  """Groups residuals by the position of the step that uses them last."""
  # Position -1 holds those that no step reads or makes.
  last = {
    v: i for i, step in enumerate(steps) for v in (*step.reads, *step.outs)
  }
  due: dict[int, list[choose.SavedResidual]] = {}
  for one in saved:
    due.setdefault(last.get(one.value, -1), []).append(one)
  return due


def make_env(
  selection: choose.Selection, pairs: Iterable[tuple[program.Value, Any]]
) -> Env:
  """Returns the values that a pass starts from: constants and given pairs."""
  return {**selection.joint.program.constants, **dict(pairs)}


def _output_values(selection: choose.Selection) -> list[program.Operand]:
  """Returns the outputs of the function and its diagnostics."""
  joint = selection.joint
  return [*joint.outputs, *jax.tree.leaves(joint.diagnostics)]


def _collect_results(
  selection: choose.Selection, env: Env, overflows: Any, fills: dict[str, Array]
) -> tuple[list[Any], choose.Diagnostics]:
  """Returns the outputs, and the diagnostics merged with those of loops."""
  inner = jax.tree.map(
    lambda v: program.read_operand(env, v), selection.joint.diagnostics
  )
  own = choose.Diagnostics(jnp.asarray(overflows, jnp.int32), fills)
  return [
    program.read_operand(env, v) for v in selection.joint.outputs
  ], inner.merge(own)
