"""Forward pass that encodes and saves the selected residuals."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import core, program
from jaxmotion.core import Array
from jaxmotion.memory import _memory_kind
from jaxmotion.memory.residuals import choose, trace
from jaxmotion.program import Step, Value

Env = dict[Value, Any]
Saved = list[tuple[Value, choose.Residual]]


def evaluate_outputs(
  selection: choose.Selection, inputs: Sequence[Array]
) -> tuple[list[Any], choose.Diagnostics]:
  """Evaluates the function without saving anything."""
  # Returns the outputs, and diagnostics of zeros in the structure of
  # `forward`'s.
  env, steps = _start_pass(selection, inputs, ())
  program.evaluate(steps, env)
  zero = jnp.zeros((), jnp.float32)
  fills = {residual.name: zero for residual in selection.measured.values()}
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
  joint = selection.joint
  if selection.plain is not None:
    env, steps = _start_pass(selection, inputs, selection.plain)
    program.evaluate(steps, env)
    plain_buffers = [
      [choose.differentiate_once(env[v])] for v in selection.plain
    ]
    return _collect_results(selection, env, 0, {}), plain_buffers
  env, steps = _start_pass(selection, inputs, selection.saved)
  read_early = trace.product_operands(steps)
  results = {v.source for v in joint.outputs if isinstance(v, Value)}
  free = find_free_to_delay(selection)
  encoded: dict[Value, choose.Buffers] = {}
  overflow_counts: list[Array] = []
  in_transit: list[choose.Buffers] = []

  def is_late(value: Value) -> bool:
    """Says whether a compiler may compute a value in the backward pass."""
    # It then keeps what the array follows from. Results of expensive steps are
    # computed once, and what an expensive step reads is there when that runs.
    written = value.source
    maker = joint.order.maker(written)
    is_cheap = maker is not None and not program.is_expensive(maker.eqn)
    is_read = written in read_early or written in results
    return is_cheap and not is_read and value not in free

  def wait_for_transfers(token: Value | None) -> None:
    """Makes `env[token]` depend on the pending host transfers."""
    # The buffers themselves stay as they were before the barrier: a loop that
    # stacks them in host memory must stack what was sent, or XLA finds no place
    # on the host for the stack.
    if in_transit and token is not None:
      _, env[token] = tie_arrays((in_transit, env[token]))
      in_transit.clear()

  def encode(due: Saved, token: Value | None) -> None:
    """Encodes residuals before anything reads the token."""
    buffers = {}
    for value, residual in due:
      coder = residual.coder
      buffers[value] = coder.encode(env[value])
      if residual.may_overflow:
        overflow_counts.append(coder.overflow_count(buffers[value]))
    wait_for_transfers(token)
    encoded.update(buffers)
    computed = [v for v, r in due if r.is_computed or r.on_host or is_late(v)]
    if token is not None:
      if computed:
        tied = [buffers[v] for v in computed]
        tied, env[token] = tie_arrays((tied, env[token]))
        encoded.update(zip(computed, tied, strict=True))
      for value in (v for v in buffers if v not in computed and v not in free):
        # Nothing is to be done for the array, and a barrier behind the next
        # step's result would keep what reads that from writing over it. But
        # the array waits for a reduction: a compiler could put off the sum of
        # a loss to the end of the backward pass.
        if value.nbytes > choose.SMALL * token.nbytes:
          encoded[value], _ = tie_arrays((buffers[value], env[token]))
    for value, residual in due:
      if residual.on_host and transfer:
        encoded[value] = _memory_kind.to_host(encoded[value])
        in_transit.append(encoded[value])

  waiting = evaluate_and_encode(steps, env, selection.saved.items(), encode)
  last_token = next((v for v in joint.outputs if isinstance(v, Value)), None)
  if waiting:
    encode(waiting, last_token)
  wait_for_transfers(last_token)
  overflows = sum((n > 0).astype(jnp.int32) for n in overflow_counts)
  fills = {
    r.name: choose.fullest_tile_fraction(env[v])
    for v, r in selection.measured.items()
  }
  buffers = [encoded[v] for v in selection.saved]
  return _collect_results(selection, env, overflows, fills), buffers


def _start_pass(
  selection: choose.Selection, inputs: Sequence[Array], wanted: Iterable[Value]
) -> tuple[Env, list[Step]]:
  """Returns the inputs and constants of a forward pass, and its steps."""
  joint = selection.joint
  env = dict(joint.program.constants)
  env.update(zip(joint.inputs, inputs, strict=True))
  ends = [*joint.outputs, *jax.tree.leaves(joint.diagnostics), *wanted]
  return env, joint.order.leading_to(ends, env, joint.effects)


def list_gates(selection: choose.Selection, outs: Sequence[Any]) -> list[Array]:
  """Returns the outputs that a backward pass should wait for: small ones."""
  # A compiler could put off the sum of a loss to the end of the backward pass.
  most = max((v.nbytes for v in selection.saved), default=0)
  pairs = zip(selection.joint.outputs, outs, strict=True)
  return [
    x
    for v, x in pairs
    if isinstance(v, Value) and choose.SMALL * v.nbytes < most
  ]


def tie_arrays(tree: Any) -> Any:
  """Returns all arrays of a tree, none available before the others."""
  # Of a pair of arrays and a token: whatever reads the returned token runs
  # after the arrays exist, and whatever reads the returned arrays runs after
  # the token exists.
  return jax.tree.map(
    core.restore_varying, lax.optimization_barrier(tree), tree
  )


def evaluate_and_encode(
  steps: Sequence[Step],
  env: Env,
  saved: Iterable[tuple[Value, choose.Residual]],
  encode: Callable[[Saved, Value | None], None],
) -> Saved:
  """Runs steps and encodes each residual soon after its last use."""
  # What waits for the encoding is the result of a step whose result is written
  # to memory anyway. The result of a cheap step would be written for the
  # barrier alone: float32 scores of an attention that the exponential reads at
  # once.
  last = {
    v: i for i, step in enumerate(steps) for v in (*step.reads, *step.outs)
  }
  due: dict[int, Saved] = {}
  for value, residual in saved:
    due.setdefault(last.get(value, -1), []).append((value, residual))
  encode(due.pop(-1, []), None)  # What no step reads or makes.
  waiting: Saved = []
  for i, step in enumerate(steps):
    program.evaluate([step], env)
    waiting += due.get(i, ())
    if waiting and _is_written(step):
      # A residual that is itself the result cannot be tied to it.
      result = step.outs[0]
      group = [pair for pair in waiting if pair[0] is not result]
      waiting = [pair for pair in waiting if pair[0] is result]
      if group:
        encode(group, result)
  return waiting


def _is_written(step: Step) -> bool:
  """Says whether a compiler writes a step's first result to memory."""
  # Random bits are computed by what reads them.
  if not step.outs or not hasattr(step.outs[0].aval, "shape"):
    return False
  return (
    program.is_expensive(step.eqn)
    and step.name not in program.RANDOM | program.VIEWS
  )


def _collect_results(
  selection: choose.Selection, env: Env, overflows: Any, fills: dict[str, Array]
) -> tuple[list[Any], choose.Diagnostics]:
  """Returns the outputs, and the diagnostics merged with those of loops."""
  read = functools.partial(program.read_operand, env)
  inner = jax.tree.map(read, selection.joint.diagnostics)
  own = choose.Diagnostics(jnp.asarray(overflows, jnp.int32), fills)
  return [read(v) for v in selection.joint.outputs], inner.merge(own)


def find_free_to_delay(selection: choose.Selection) -> set[Value]:
  """Returns saved arrays that XLA may compute late and hold no more for."""
  # A compiler that computes such an array in the backward pass keeps what it
  # follows from, which takes no more memory. There it writes the result over
  # that, which a barrier would keep it from. Rows of a loop are none of these:
  # they are written at the end of each iteration.
  joint = selection.joint
  in_memory = {*selection.always_live, *joint.program.constants}
  in_memory.update(selection.saved)
  free: set[Value] = set()
  for value, residual in selection.saved.items():
    if residual.repeats > 1 or residual.is_computed or residual.on_host:
      continue
    others = in_memory - {value}
    large = {
      v: maker
      for v, maker in joint.find_sources(value, others.__contains__).items()
      if v not in others and choose.SMALL * v.nbytes > value.nbytes
    }
    # A reduction is delayed with what it reads: packed bits with their array.
    is_reduced = any(
      maker is not None and maker.name in program.REDUCTIONS
      for maker in large.values()
    )
    if not is_reduced and trace.count_bytes(large) <= value.nbytes:
      free.add(value)
  return free
