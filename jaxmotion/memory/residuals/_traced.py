"""A function traced at some arguments, with its selected residuals."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from jaxmotion import core, program
from jaxmotion.core import Array, PyTree
from jaxmotion.memory.residuals import _leaves, choose, trace
from jaxmotion.memory.residuals.run import (
  HostBuffers,
  backward,
  evaluate_outputs,
  forward,
  list_gates,
  refuse_forward_mode,
  reverse_only,
  run_scan,
)


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
    options: choose.Options,
    prefix: str = "",
    repeats: int = 1,
  ):
    given = _leaves.ArrayLeaves(tuple(args))
    self.leaves = given.arrays
    live_args = _check_positions(params, len(args))

    def flat(*leaves: Array) -> list[Array]:
      self._result = _leaves.ArrayLeaves(fn(*given.fill(leaves)))
      return self._result.take_arrays()

    closed = jax.make_jaxpr(flat)(*self.leaves)
    trace.check_effects(fn, closed.jaxpr.effects)
    self._program = program.flatten(closed)
    tracers = {
      v: c
      for v, c in self._program.constants.items()
      if isinstance(c, jax.core.Tracer)
    }
    self.closed_over = list(tracers.values())
    self._inputs = [*tracers, *self._program.inputs]
    self._out_is_inexact = [core.is_inexact(a) for a in closed.out_avals]
    self._scans = _prepare_scans(self._program.steps, options, prefix, repeats)
    self._out_avals = closed.out_avals
    names = [f"closed_over_{i}" for i in range(len(tracers))]
    names += [core.leaf_path(path) for path in given.paths]
    always_live = [True] * len(tracers)
    always_live += [path[0].idx in live_args for path in given.paths]
    inner = self._scans.values()
    of_loops = [r for scan in inner for r in scan.body.saved_residuals()]
    self._make_chooser = functools.partial(
      choose.ResidualChooser,
      input_names=names,
      always_live=always_live,
      options=options,
      prefix=prefix,
      repeats=repeats,
      reruns_loops=repeats > 1 and not any(r.kept for r in of_loops),
    )
    self._is_repeated, self._measures = repeats > 1, options.measure
    self._budget = options.memory_budget
    self._narrower: dict[_Wanted, choose.Selection] = {}
    self._choosers: dict[tuple[int, ...], choose.ResidualChooser] = {}
    self._chooser()  # Errors are raised here.

  @functools.cached_property
  def selection(self) -> choose.Selection:
    """The residuals that are saved where all gradients are wanted."""
    return self._chooser().choose(self._budget)

  def with_budget(self, budget: float) -> TracedFunction:
    """Returns the function with residuals for another budget."""
    # The joint program depends on the residuals of loops alone: where these
    # stay the same, nothing is traced again.
    found = copy.copy(self)
    vars(found).pop("selection", None)
    found._budget, found._narrower = budget, {}
    found._scans = self._scans_with_budget(budget)
    return found

  def count_bytes(self) -> int:
    """Returns the encoded bytes of all residuals on the device."""
    return choose.count_device_bytes(self.saved_residuals())

  def estimate_bytes(self, budget: float) -> int:
    """Returns nearly what `with_budget(budget)` counts."""
    # The joint program is the one that is there, whatever the residuals of
    # loops.
    selection = self._chooser().choose(budget)
    found = choose.count_device_bytes(self._own_residuals(selection))
    for i, scan in enumerate(self._scans_with_budget(budget).values()):
      if i not in selection.rerun_loops:
        found += scan.body.count_bytes()
    return found

  def keep_flows(self, keep: bool) -> None:
    """Keeps, or frees, what makes `with_budget` fast."""
    for chooser in self._choosers.values():
      chooser.keep_flows(keep)
    for scan in self._scans.values():
      scan.body.keep_flows(keep)

  def _scans_with_budget(self, budget: float) -> dict[int, _ScanStep]:
    share = math.inf if self._is_repeated else budget
    pairs = self._scans.items()
    return {i: s._replace(body=s.body.with_budget(share)) for i, s in pairs}

  def _chooser(self) -> choose.ResidualChooser:
    """Returns the chooser of the joint program, with loops as they are."""
    # The bodies keep their selections.
    key = tuple(id(scan.body.selection) for scan in self._scans.values())
    if key not in self._choosers:
      values = [*self.closed_over, *self.leaves]
      joint = trace.trace_joint(self._evaluate, values, self._out_avals)
      self._choosers[key] = self._make_chooser(joint)
    return self._choosers[key]

  def saved_residuals(self) -> list[choose.Residual]:
    """Returns the saved residuals, those of loops included."""
    saved = self._own_residuals(self.selection)
    for i, scan in enumerate(self._scans.values()):
      if i not in self.selection.rerun_loops:
        saved += scan.body.saved_residuals()
    return saved

  def _own_residuals(
    self, selection: choose.Selection
  ) -> list[choose.Residual]:
    """Returns the residuals of a selection but for those of loops."""
    saved = [s.residual for s in selection.saved]
    # Buffers that a loop returns are counted as residuals of its body.
    return [r for r in saved if not (self._scans and r.is_of_scan)]

  def residual_names(self) -> Iterator[str]:
    """Yields the names of all residuals that a rule may match."""
    yield from (r.name for r in self.saved_residuals())
    yield from self._matched_names()

  def _matched_names(self) -> list[str]:
    """Returns names of values that got an action, those of loops included."""
    inner = (scan.body for scan in self._scans.values())
    own = list(self._chooser().matched_names)
    return own + [name for body in inner for name in body._matched_names()]

  def take_leaves(self) -> list[Array]:
    """Returns the leaves and forgets them: backward passes outlive tracers."""
    leaves, self.leaves = self.leaves, []
    return leaves

  def __call__(
    self, leaves: Sequence[Array]
  ) -> tuple[PyTree, choose.Diagnostics]:
    """Evaluates the function, differentiable by the two passes."""
    # Returns the result, and diagnostics of the forward pass.
    count = len(self.closed_over)

    @jax.custom_vjp
    def run(closed_over: list[Array], leaves: list[Array]) -> Any:
      if self._measures and self.selection.measured:
        return evaluate_outputs(self.selection, [*closed_over, *leaves])
      # Not the joint program: JAX drops checks from loops that it
      # differentiates.
      return self._evaluate(*closed_over, *leaves)

    def run_forward(closed_over: list[Any], leaves: list[Any]) -> Any:
      given = [*closed_over, *leaves]
      wanted = _Wanted(tuple(one.perturbed for one in given))
      selection = self._select_for(wanted)
      inputs = [one.value for one in given]
      outs, buffers = forward(selection, inputs)
      gates = [] if self._is_repeated else list_gates(selection, outs[0])
      return outs, (wanted, selection.mask_inputs(inputs), buffers, gates)

    def run_backward(residuals: Any, cotangents: Any) -> Any:
      wanted, inputs, buffers, gates = residuals
      selection = self._select_for(wanted)
      cts = map(_fill_zero, self.select_cotangents(cotangents[0]))
      gradients = backward(selection, inputs, buffers, list(cts), gates=gates)
      return gradients[:count], gradients[count:]

    run.defvjp(run_forward, run_backward, symbolic_zeros=True)
    given = reverse_only([*self.closed_over, *leaves])
    try:
      outs, notes = run(given[:count], given[count:])
    except TypeError as error:
      # JAX sees a batch of tangents before `reverse_only` does.
      if "apply forward-mode" in str(error):
        refuse_forward_mode()
      raise
    return self.fill_result(outs), notes

  def _select_for(self, wanted: _Wanted) -> choose.Selection:
    """Returns the selection for the gradients that are wanted."""
    if wanted not in self._narrower:
      chooser = self._chooser()
      narrower = chooser.without_gradients(wanted.flags)
      found = (
        self.selection if narrower is chooser else narrower.choose(self._budget)
      )
      if self._budget is None and not self._is_repeated:
        found = narrower.leave_plain(found)
      self._narrower[wanted] = found
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
  ) -> tuple[tuple[list[Array], choose.Diagnostics], list[choose.Buffers]]:
    """Returns the outputs, the diagnostics and the saved buffers."""
    return forward(self.selection, [*self.closed_over, *self.leaves])

  def _evaluate(self, *values: Array) -> tuple[list[Any], choose.Diagnostics]:
    """Evaluates the program with scans and max pooling replaced."""
    env = {
      **self._program.constants,
      **dict(zip(self._inputs, values, strict=True)),
    }
    notes = choose.Diagnostics.empty()
    for i, step in enumerate(self._program.steps):
      if trace.is_max_pool(step):
        with step.named():
          env[step.outs[0]] = trace.evaluate_max_pool(
            step, program.read_operand(env, step.ins[0])
          )
      elif i in self._scans:
        operands = [program.read_operand(env, v) for v in step.ins]
        with step.named():
          outs, scan_notes = self._scans[i].run(operands)
        env.update(zip(step.outs, outs, strict=True))
        notes = notes.merge(scan_notes)
      else:
        program.evaluate([step], env)
    return [program.read_operand(env, v) for v in self._program.outputs], notes


def _fill_zero(cotangent: Any) -> Any:
  """Returns an array in the place of a zero that JAX keeps symbolic."""
  if isinstance(cotangent, SymbolicZero):
    return ad.instantiate_zeros(ad.Zero(cotangent.aval))
  return cotangent


def trace_in_budget(
  fn: Callable[..., PyTree],
  args: Sequence[PyTree],
  params: int | Sequence[int],
  options: choose.Options,
  repeats: int = 1,
) -> TracedFunction:
  """Traces a function whose residuals keep to the budget."""
  # A budget in bytes is that of the function and its loops together. The
  # largest share is taken whose residuals fit, of 32 equal steps.
  most = options.memory_budget
  if most is None or most <= 1:
    return TracedFunction(fn, args, params, options, repeats=repeats)
  shared = options._replace(memory_budget=0.5)
  traced = TracedFunction(fn, args, params, shared, repeats=repeats)
  traced.keep_flows(True)
  with_share = functools.cache(traced.with_budget)
  share = choose.find_largest_share(
    traced.estimate_bytes, lambda n: with_share(n).count_bytes(), most
  )
  if share is None:
    raise ValueError(
      "`memory_budget` must be at least the fewest bytes that the residuals "
      f"can have, {with_share(0.0).count_bytes()}, got {most!r}."
    )
  found = with_share(share)
  found.keep_flows(False)
  return found


class _ScanStep(NamedTuple):
  """A scan of a program, with the residuals of its body selected.

  Attributes:
    body: the body as a function of (consts, x, carry).
    params: parameters of the scan's equation.
  """

  body: TracedFunction
  params: dict[str, Any]

  def run(
    self, operands: Sequence[Array]
  ) -> tuple[list[Array], choose.Diagnostics]:
    """Runs the scan on the operands of its equation."""
    # Returns the results of the equation, and the diagnostics of all
    # iterations.
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
  steps: Sequence[program.Step],
  options: choose.Options,
  prefix: str,
  repeats: int,
) -> dict[int, _ScanStep]:
  """Traces the bodies of all scans and selects their residuals."""
  # This happens before the program is traced with its backward pass. A trace
  # may run any number of times, so it should have no side effects; and a body
  # depends on the types of its operands alone. Under a budget, a loop in the
  # body of a loop may be run again as a whole. It then saves whatever its
  # matmuls give, for one iteration of the outer loop.
  if repeats > 1 and options.memory_budget is not None:
    options = options._replace(memory_budget=math.inf)
  found: dict[int, _ScanStep] = {}
  for i, step in enumerate(steps):
    if step.name == "scan":
      params = step.eqn.params
      inner_prefix = f"{prefix}scan_{len(found)}/"
      body = _trace_body(params, options, inner_prefix, repeats)
      found[i] = _ScanStep(body, params)
  return found


def _trace_body(
  params: dict[str, Any], options: choose.Options, prefix: str, repeats: int
) -> TracedFunction:
  """Traces a scan's body as a function of (consts, x, carry)."""
  # Consts and rows of xs are always live in the body: the scan's backward pass
  # reads both, and the cut of the enclosing function decides how they are
  # saved.
  jaxpr, _, carried = core.scan_parts(params)

  def body(consts: Any, x: Any, carry: Any) -> Any:
    outs = core.jax_core.jaxpr_as_fun(jaxpr)(*consts, *carry, *x)
    return outs[:carried], outs[carried:]

  args = [a.strip_weak_type() for a in jaxpr.in_avals]
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
  """Groups the operands of a scan into consts, xs and carry."""
  # In the scan's equation the order is consts, carry, xs.
  _, consts, carried = core.scan_parts(params)
  last = consts + carried
  return (
    list(operands[:consts]),
    list(operands[last:]),
    list(operands[consts:last]),
  )


def check_params(params: int | Sequence[int]) -> set[int]:
  """Returns the positions in `params`, checked."""
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
