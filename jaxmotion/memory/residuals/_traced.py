"""A function traced at some arguments, with its selected residuals."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core
from jax.interpreters import ad

from jaxmotion.core import (
  Array,
  PyTree,
  abstract_on_mesh,
  is_inexact,
  leaf_path,
  scan_parts,
)
from jaxmotion.memory.residuals._leaves import ArrayLeaves
from jaxmotion.memory.residuals.choose import (
  Buffers,
  Diagnostics,
  Options,
  Residual,
  Selection,
  choose_residuals,
)
from jaxmotion.memory.residuals.run import (
  HostBuffers,
  backward,
  evaluate_outputs,
  forward,
  run_scan,
)
from jaxmotion.memory.residuals.trace import (
  evaluate_max_pool,
  is_max_pool,
  trace_joint,
)
from jaxmotion.program import Step, evaluate, flatten, read_operand

# Effects that `jax.checkpoint` allows. Inside shard_map the names of mesh axes
# count as effects.
_ALLOWED_EFFECTS = (
  "DebugEffect",
  "ErrorEffect",
  "NamedAxisEffect",
  "OrderedDebugEffect",
)

# Steps of the search for the share that a budget in bytes allows.
_SHARES = 32


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
  """The inputs whose gradients are wanted: a tree without leaves.

  Attributes:
    flags: for each input, whether something is differentiated by it.
  """

  flags: tuple[bool, ...]


class TracedFunction:
  """A function traced at some arguments, with its selected residuals.

  The function is traced once by itself. In the flat program, each scan is
  replaced by one whose body is a `TracedFunction` again, and each max pooling
  by one that saves the argmax. The changed program is traced together with its
  backward pass, and the residuals are chosen from that joint program.

  Args:
    fn: function of arrays.
    args: its arguments: trees of arrays, tracers, shapes and constants.
    params: positions of the arguments that are always live.
    options: options of the choice of residuals.
    prefix: prefix of the names of residuals.
    repeats: number of times it runs with residuals of its own.

  Attributes:
    leaves: arrays of the arguments; their other leaves are constants.
    closed_over: arrays of an enclosing trace that `fn` closes over. They are
      inputs of the joint program, since the enclosing function may be
      differentiated with respect to them.
    selection: the joint program and its selected residuals, a function of
      (*closed_over, *leaves).

  Raises:
    ValueError: `fn` has side effects, or `params` are not arguments.
  """

  def __init__(
    self,
    fn: Callable[..., PyTree],
    args: Sequence[PyTree],
    params: int | Sequence[int],
    options: Options,
    prefix: str = "",
    repeats: int = 1,
  ):
    given = ArrayLeaves(tuple(args))
    self.leaves = given.arrays
    live_args = _check_positions(params, len(args))

    def flat(*leaves: Array) -> list[Array]:
      self._result = ArrayLeaves(fn(*given.fill(leaves)))
      return self._result.arrays

    closed = jax.make_jaxpr(flat)(*self.leaves)
    _check_effects(fn, closed.jaxpr.effects)
    self._program = flatten(closed)
    tracers = {
      v: c
      for v, c in self._program.constants.items()
      if isinstance(c, jax.core.Tracer)
    }
    self.closed_over = list(tracers.values())
    self._inputs = [*tracers, *self._program.inputs]
    self._out_is_inexact = [is_inexact(a) for a in closed.out_avals]
    self._scans = _prepare_scans(self._program.steps, options, prefix, repeats)
    joint = trace_joint(
      self._evaluate, [*self.closed_over, *self.leaves], closed.out_avals
    )
    names = [f"closed_over_{i}" for i in range(len(tracers))]
    names += [leaf_path(path) for path in given.paths]
    always_live = [True] * len(tracers)
    always_live += [path[0].idx in live_args for path in given.paths]
    self._choose = functools.partial(
      choose_residuals,
      input_names=names,
      always_live=always_live,
      options=options,
      prefix=prefix,
      repeats=repeats,
    )
    self.selection = self._choose(joint)
    self._narrower: dict[_Wanted, Selection] = {}

  def saved_residuals(self) -> list[Residual]:
    """Returns the saved residuals, those of loops included."""
    saved = [s.residual for s in self.selection.saved]
    if self._scans:
      # Buffers that a loop returns are counted as residuals of its body.
      saved = [r for r in saved if not r.is_of_scan]
    inner = (scan.body for scan in self._scans.values())
    return saved + [r for body in inner for r in body.saved_residuals()]

  def residual_names(self) -> list[str]:
    """Returns the names of all residuals that a rule may match."""
    return [r.name for r in self.saved_residuals()] + self._matched_names()

  def _matched_names(self) -> list[str]:
    """Returns names of values that got an action, those of loops included."""
    inner = (scan.body for scan in self._scans.values())
    own = list(self.selection.matched_names)
    return own + [name for body in inner for name in body._matched_names()]

  def __call__(
    self, leaves: Sequence[Array] | None = None
  ) -> tuple[PyTree, Diagnostics]:
    """Evaluates the function, differentiable by the two passes.

    Args:
      leaves: leaves of the arguments; None uses those of the trace.

    Returns:
      The result, and diagnostics of the forward pass.
    """
    selection, count = self.selection, len(self.closed_over)

    @jax.custom_vjp
    def run(closed_over: list[Array], leaves: list[Array]) -> Any:
      if selection.measured:
        return evaluate_outputs(selection, [*closed_over, *leaves])
      # Not the joint program: JAX drops checks from loops that it
      # differentiates.
      return self._evaluate(*closed_over, *leaves)

    def run_forward(closed_over: list[Any], leaves: list[Any]) -> Any:
      given = [*closed_over, *leaves]
      wanted = _Wanted(tuple(one.perturbed for one in given))
      selection = self._select_for(wanted)
      inputs = [one.value for one in given]
      outs, buffers = forward(selection, inputs)
      return outs, (wanted, selection.mask_inputs(inputs), buffers)

    def run_backward(residuals: Any, cotangents: Any) -> Any:
      wanted, inputs, buffers = residuals
      selection = self._select_for(wanted)
      cts = map(_fill_zero, self.select_cotangents(cotangents[0]))
      gradients = backward(selection, inputs, buffers, list(cts))
      return gradients[:count], gradients[count:]

    run.defvjp(run_forward, run_backward, symbolic_zeros=True)
    given = self.leaves if leaves is None else list(leaves)
    outs, notes = run(self.closed_over, given)
    return self.fill_result(outs), notes

  def _select_for(self, wanted: _Wanted) -> Selection:
    """Returns the selection for the gradients that are wanted, and no others.

    Barriers tie all gradients of a backward pass together, so that a compiler
    would keep those that nothing reads.
    """
    joint = self.selection.joint
    pairs = list(zip(joint.gradients, wanted.flags, strict=True))
    if all(is_wanted or g is None for g, is_wanted in pairs):
      return self.selection
    if wanted not in self._narrower:
      gradients = tuple(g if is_wanted else None for g, is_wanted in pairs)
      narrower = joint._replace(gradients=gradients)
      self._narrower[wanted] = self._choose(narrower)
    return self._narrower[wanted]

  def fill_result(self, outs: Sequence[Array]) -> PyTree:
    """Returns the function's result with these arrays in it."""
    return self._result.fill(outs)

  def select_cotangents(self, cotangents: Sequence[Any]) -> list[Any]:
    """Returns the cotangents of the inexact outputs."""
    pairs = zip(cotangents, self._out_is_inexact, strict=True)
    return [ct for ct, inexact in pairs if inexact]

  def run_forward(
    self,
  ) -> tuple[tuple[list[Array], Diagnostics], list[Buffers]]:
    """Returns the outputs, the diagnostics and the saved buffers."""
    return forward(self.selection, [*self.closed_over, *self.leaves])

  def _evaluate(self, *values: Array) -> tuple[list[Any], Diagnostics]:
    """Evaluates the program with scans and max pooling replaced.

    Args:
      *values: arrays for `closed_over` and `leaves`.

    Returns:
      The outputs, and the diagnostics of all scans.
    """
    env = {
      **self._program.constants,
      **dict(zip(self._inputs, values, strict=True)),
    }
    notes = Diagnostics.empty()
    for i, step in enumerate(self._program.steps):
      if is_max_pool(step):
        with step.named():
          env[step.outs[0]] = evaluate_max_pool(
            step, read_operand(env, step.ins[0])
          )
      elif i in self._scans:
        operands = [read_operand(env, v) for v in step.ins]
        with step.named():
          outs, scan_notes = self._scans[i].run(operands)
        env.update(zip(step.outs, outs, strict=True))
        notes = notes.merge(scan_notes)
      else:
        evaluate([step], env)
    return [read_operand(env, v) for v in self._program.outputs], notes


def _fill_zero(cotangent: Any) -> Any:
  """Returns an array in the place of a zero that JAX keeps symbolic."""
  if isinstance(cotangent, SymbolicZero):
    return ad.instantiate_zeros(ad.Zero(cotangent.aval))
  return cotangent


def trace_in_budget(
  fn: Callable[..., PyTree],
  args: Sequence[PyTree],
  params: int | Sequence[int],
  options: Options,
) -> TracedFunction:
  """Traces a function whose residuals keep to the budget.

  A budget in bytes is that of the function and its loops together. The largest
  share is taken whose residuals fit, of 32 equal steps.

  Raises:
    ValueError: the fewest bytes are more than the budget.
  """
  most = options.memory_budget
  if most is None or most <= 1:
    return TracedFunction(fn, args, params, options)
  traced: dict[int, TracedFunction] = {}

  def is_above(share: int) -> bool:
    shared = options._replace(memory_budget=share / _SHARES)
    traced[share] = TracedFunction(fn, args, params, shared)
    return _count_bytes(traced[share]) > most

  first = bisect.bisect_left(range(_SHARES + 1), True, key=is_above)
  if first == 0:
    raise ValueError(
      "`memory_budget` must be at least the fewest bytes that the residuals "
      f"can have, {_count_bytes(traced[0])}, got {most!r}."
    )
  return traced[first - 1]


def _count_bytes(traced: TracedFunction) -> int:
  found = traced.saved_residuals()
  return sum(r.encoded_bytes * r.repeats for r in found if not r.on_host)


class _ScanStep(NamedTuple):
  """A scan of a program, with the residuals of its body selected.

  Attributes:
    body: the body as a function of (consts, x, carry).
    params: parameters of the scan's equation.
  """

  body: TracedFunction
  params: dict[str, Any]

  def run(self, operands: Sequence[Array]) -> tuple[list[Array], Diagnostics]:
    """Runs the scan on the operands of its equation.

    Returns:
      The results of the equation, and the diagnostics of all iterations.
    """
    consts, xs, init = _group_operands(operands, self.params)
    options = {k: self.params[k] for k in ("length", "reverse", "unroll")}
    body, selection = self.body, self.body.selection
    layout = HostBuffers([s.residual for s in selection.saved])
    if layout:
      consts = [*body.closed_over, *consts]
      (carry, ys), notes = run_scan(
        selection, layout, consts, init, xs, **options
      )
      return [*carry, *ys], notes

    def iteration(carry: Any, x: Any) -> Any:
      (carry, ys), notes = body([*consts, *x, *carry])
      return carry, (ys, notes)

    carry, (ys, notes) = lax.scan(iteration, init, xs, **options)
    return [*carry, *ys], notes.reduce_iterations()


def _prepare_scans(
  steps: Sequence[Step], options: Options, prefix: str, repeats: int
) -> dict[int, _ScanStep]:
  """Traces the bodies of all scans and selects their residuals.

  This happens before the program is traced with its backward pass. A trace
  may run any number of times, so it should have no side effects; and a body
  depends on the types of its operands alone.

  Returns:
    The scans by the position of their step.
  """
  found: dict[int, _ScanStep] = {}
  for i, step in enumerate(steps):
    if step.name == "scan":
      params = step.eqn.params
      inner_prefix = f"{prefix}scan_{len(found)}/"
      body = _trace_body(params, options, inner_prefix, repeats)
      found[i] = _ScanStep(body, params)
  return found


def _trace_body(
  params: dict[str, Any], options: Options, prefix: str, repeats: int
) -> TracedFunction:
  """Traces a scan's body as a function of (consts, x, carry).

  Consts and rows of xs are always live in the body: the scan's backward pass
  reads both, and the cut of the enclosing function decides how they are saved.
  """
  jaxpr, _, carried = scan_parts(params)

  def body(consts: Any, x: Any, carry: Any) -> Any:
    outs = core.jaxpr_as_fun(jaxpr)(*consts, *carry, *x)
    return outs[:carried], outs[carried:]

  args = [abstract_on_mesh(a) for a in jaxpr.in_avals]
  return TracedFunction(
    body,
    _group_operands(args, params),
    (0, 1),
    options,
    prefix,
    repeats * params["length"],
  )


def _group_operands(
  operands: Sequence[Any], params: dict[str, Any]
) -> tuple[list[Any], list[Any], list[Any]]:
  """Groups the operands of a scan into consts, xs and carry.

  In the scan's equation the order is consts, carry, xs.
  """
  _, consts, carried = scan_parts(params)
  last = consts + carried
  return (
    list(operands[:consts]),
    list(operands[last:]),
    list(operands[consts:last]),
  )


def check_params(params: int | Sequence[int]) -> set[int]:
  """Returns the positions in `params`, checked.

  Raises:
    TypeError: `params` is no integer and no sequence of them.
    ValueError: a position is negative.
  """
  positions: list[Any] = (
    list(params) if isinstance(params, list | tuple | range) else [params]
  )
  message = f"`params` must be positions of arguments, got {params!r}."
  if any(type(position) is not int for position in positions):
    raise TypeError(message)
  if any(position < 0 for position in positions):
    raise ValueError(message)
  return set(positions)


def _check_positions(params: int | Sequence[int], count: int) -> set[int]:
  """Returns the positions in `params`, each of which must be an argument."""
  positions = check_params(params)
  if any(position >= count for position in positions):
    raise ValueError(
      f"`params` must be positions of the {count} arguments, got {params!r}."
    )
  return positions


def _check_effects(fn: Callable[..., PyTree], effects: Any) -> None:
  """Raises if a function has side effects that must happen exactly once."""
  found = [e for e in effects if type(e).__name__ not in _ALLOWED_EFFECTS]
  if found:
    inner = fn.func if isinstance(fn, functools.partial) else fn
    name = getattr(inner, "__name__", repr(inner))
    raise ValueError(
      "`fn` must have no side effects but those of `jax.debug` and `checkify`, "
      f"got {name} with {found}: its backward pass may run parts of it again."
    )
