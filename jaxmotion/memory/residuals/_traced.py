"""A function traced at some arguments, with its selected residuals."""

import bisect
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from jaxmotion import core, program
from jaxmotion.core import Array, PyTree
from jaxmotion.memory.residuals import _arguments, choose, run, trace
from jaxmotion.program import Step, Value

# Steps of the search for the fraction that a budget in bytes allows.
_FRACTIONS = 32


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
  """For each input, whether something is differentiated by it; no leaves."""

  flags: tuple[bool, ...]


class TracedFunction:
  """A function traced at some arguments, with its selected residuals.

  The function is traced once by itself. In the flat program, each scan is
  replaced by one whose body is a `TracedFunction` again, and each max pooling
  by one that saves the argmax. The changed program is traced together with its
  backward pass, and the residuals are chosen from that joint program.
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
    # args: trees of arrays, tracers, shapes and constants. params: positions of
    # those that are always live. prefix: of the names of residuals. repeats:
    # times that the function runs with residuals of its own.
    self.given = given = _arguments.ArrayLeaves(tuple(args))
    live_args = _arguments.check_params(params, len(args))

    def flat(*leaves: Array) -> list[Array]:
      self.result = _arguments.ArrayLeaves(fn(*given.fill(leaves)))
      return self.result.take_arrays()

    closed = jax.make_jaxpr(flat)(*given.arrays)
    trace.check_effects(fn, closed.jaxpr.effects)
    self._program = program.flatten(closed)
    tracers = {
      v: c
      for v, c in self._program.constants.items()
      if isinstance(c, jax.core.Tracer)
    }
    # Arrays of an enclosing trace that `fn` closes over are inputs of the joint
    # program, before the leaves, since the enclosing function may be
    # differentiated with respect to them.
    self.closed_over = list(tracers.values())
    self._inputs = [*tracers, *self._program.inputs]
    self._out_avals = closed.out_avals
    self._scans = _prepare_scans(self._program.steps, options, prefix, repeats)
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

  def with_budget(self, budget: float) -> "TracedFunction":
    """Returns the function with residuals for another budget."""
    # The joint program depends on the residuals of loops alone: where these
    # stay the same, nothing is traced again.
    other = copy.copy(self)
    vars(other).pop("selection", None)
    other._budget, other._narrower = budget, {}
    other._scans = self._scans_with_budget(budget)
    return other

  def count_bytes(self) -> int:
    """Returns the encoded bytes of all residuals on the device."""
    return choose.count_device_bytes(self.saved_residuals())

  def estimate_bytes(self, budget: float) -> int:
    """Returns nearly the bytes of `with_budget(budget)`, without a trace."""
    # The joint program is the one that is there, whatever the residuals of
    # loops.
    selection = self._chooser().choose(budget)
    scans = self._scans_with_budget(budget)
    return choose.count_device_bytes(self._list_residuals(selection, scans))

  def _scans_with_budget(self, budget: float) -> "dict[Step, _ScanStep]":
    """Returns the loops with residuals for another budget."""
    own = math.inf if self._is_repeated else budget  # See `_prepare_scans`.
    return {
      step: scan._replace(body=scan.body.with_budget(own))
      for step, scan in self._scans.items()
    }

  def _chooser(self) -> choose.ResidualChooser:
    """Returns the chooser of the joint program, with loops as they are."""
    # The bodies keep their selections.
    key = tuple(id(scan.body.selection) for scan in self._scans.values())
    if key not in self._choosers:
      values = [*self.closed_over, *self.given.arrays]
      joint = trace.trace_joint(self._evaluate, values, self._out_avals)
      self._choosers[key] = self._make_chooser(joint)
    return self._choosers[key]

  def saved_residuals(self) -> list[choose.Residual]:
    """Returns the saved residuals, those of loops included."""
    return self._list_residuals(self.selection, self._scans)

  def _list_residuals(
    self, selection: choose.Selection, scans: "Mapping[Step, _ScanStep]"
  ) -> list[choose.Residual]:
    """Returns the residuals of a selection and of its loops."""
    # Buffers that a loop returns are counted as residuals of its body.
    saved = selection.saved.values()
    residuals = [r for r in saved if not (scans and r.is_of_scan)]
    for i, scan in enumerate(scans.values()):
      if i not in selection.rerun_loops:
        residuals += scan.body.saved_residuals()
    return residuals

  def residual_names(self) -> list[str]:
    """Returns the names of all residuals that a rule may match."""
    return [r.name for r in self.saved_residuals()] + self._matched_names()

  def _matched_names(self) -> list[str]:
    """Returns names of values that got an action, those of loops included."""
    own = list(self._chooser().matched_names)
    bodies = (scan.body for scan in self._scans.values())
    return own + [name for body in bodies for name in body._matched_names()]

  def __call__(
    self, leaves: Sequence[Array]
  ) -> tuple[PyTree, choose.Diagnostics]:
    """Evaluates the function, differentiable by the two passes."""
    # Returns the result, and diagnostics of the forward pass.
    count = len(self.closed_over)

    @jax.custom_vjp
    def run_function(closed_over: list[Array], leaves: list[Array]) -> Any:
      if self._measures and self.selection.measured:
        return run.evaluate_outputs(self.selection, [*closed_over, *leaves])
      # Not the joint program: JAX drops checks from loops that it
      # differentiates.
      return self._evaluate(*closed_over, *leaves)

    def run_forward(closed_over: list[Any], leaves: list[Any]) -> Any:
      """Returns the outputs, and what the backward pass needs."""
      given = [*closed_over, *leaves]
      wanted = _Wanted(tuple(one.perturbed for one in given))
      selection = self._select_for(wanted)
      inputs = [one.value for one in given]
      outs, buffers = run.forward(selection, inputs)
      gates = [] if self._is_repeated else run.list_gates(selection, outs[0])
      return outs, (wanted, selection.mask_inputs(inputs), buffers, gates)

    def run_backward(residuals: Any, cotangents: Any) -> Any:
      """Returns the gradients of both lists."""
      wanted, inputs, buffers, gates = residuals
      given_cts = self.select_cotangents(cotangents[0])
      cts = [
        ad.instantiate_zeros(ad.Zero(ct.aval))
        if isinstance(ct, SymbolicZero)
        else ct
        for ct in given_cts
      ]
      selection = self._select_for(wanted)
      gradients = run.backward(selection, inputs, buffers, cts, gates=gates)
      return gradients[:count], gradients[count:]

    run_function.defvjp(run_forward, run_backward, symbolic_zeros=True)
    given = _arguments.reverse_only([*self.closed_over, *leaves])
    try:
      outs, notes = run_function(given[:count], given[count:])
    except TypeError as error:
      # JAX sees a batch of tangents before `reverse_only` does.
      if "apply forward-mode" in str(error):
        _arguments.refuse_forward_mode()
      raise
    return self.result.fill(outs), notes

  def _select_for(self, wanted: _Wanted) -> choose.Selection:
    """Returns what to save if JAX wants only some of the gradients."""
    if wanted not in self._narrower:
      chooser = self._chooser()
      narrower = chooser.without_gradients(wanted.flags)
      selection = (
        self.selection if narrower is chooser else narrower.choose(self._budget)
      )
      if not self._is_repeated:
        selection = narrower.leave_plain(selection)
      self._narrower[wanted] = selection
    return self._narrower[wanted]

  def select_cotangents(self, cotangents: Sequence[Any]) -> list[Any]:
    """Returns the cotangents of the inexact outputs."""
    pairs = zip(cotangents, self._out_avals, strict=True)
    return [ct for ct, aval in pairs if core.is_inexact(aval)]

  def _evaluate(self, *values: Array) -> tuple[list[Any], choose.Diagnostics]:
    """Evaluates the program with scans and max pooling replaced."""
    env: dict[Value, Any] = dict(self._program.constants)
    env.update(zip(self._inputs, values, strict=True))
    notes = choose.Diagnostics.empty()
    for step in self._program.steps:
      if trace.is_max_pool(step):
        with step.named():
          operand = program.read_operand(env, step.ins[0])
          env[step.outs[0]] = trace.evaluate_max_pool(step, operand)
      elif step in self._scans:
        operands = [program.read_operand(env, v) for v in step.ins]
        with step.named():
          outs, scan_notes = self._scans[step].evaluate(operands)
        env.update(zip(step.outs, outs, strict=True))
        notes = notes.merge(scan_notes)
      else:
        program.evaluate([step], env)
    return [program.read_operand(env, v) for v in self._program.outputs], notes


def trace_in_budget(
  fn: Callable[..., PyTree],
  args: Sequence[PyTree],
  params: int | Sequence[int],
  options: choose.Options,
  repeats: int = 1,
) -> TracedFunction:
  """Traces a function, and finds the share that its budget in bytes allows."""
  # A budget in bytes is that of the function and its loops together. The
  # largest fraction is taken whose residuals fit, of 32 equal steps.
  most = options.memory_budget
  if most is None or most <= 1:
    return TracedFunction(fn, args, params, options, repeats=repeats)
  shared = options._replace(memory_budget=0.5)
  traced = TracedFunction(fn, args, params, shared, repeats=repeats)
  with_fraction = functools.cache(lambda n: traced.with_budget(n / _FRACTIONS))
  is_above = lambda n: with_fraction(n).count_bytes() > most
  seems_above = lambda n: traced.estimate_bytes(n / _FRACTIONS) > most
  # The fraction is guessed from estimates, since counting may cost a trace.
  low, high = 0, _FRACTIONS + 1
  guess = bisect.bisect_left(range(high), True, key=seems_above)
  for n in (guess, guess - 1):
    if low <= n < high:
      low, high = (low, n) if is_above(n) else (n + 1, high)
  first = low + bisect.bisect_left(range(low, high), True, key=is_above)
  if first == 0:
    raise ValueError(
      "`memory_budget` must be at least the fewest bytes that the residuals "
      f"can have, {with_fraction(0).count_bytes()}, got {most!r}."
    )
  return with_fraction(first - 1)


class _ScanStep(NamedTuple):
  """A scan of a program, with the residuals of its body selected."""

  body: TracedFunction  # A function of (consts, x, carry).
  params: Mapping[str, Any]  # Of the scan's equation.

  def evaluate(
    self, operands: Sequence[Array]
  ) -> tuple[list[Array], choose.Diagnostics]:
    """Runs the scan so that its backward pass finds what the body saved."""
    # Returns the results of the equation, and the diagnostics of all
    # iterations.
    consts, xs, init = _group_operands(operands, self.params)
    options = {k: self.params[k] for k in ("length", "reverse", "unroll")}
    body, selection = self.body, self.body.selection
    layout = run.HostBuffers([*selection.saved.values()])

    def iteration(carry: Any, x: Any) -> Any:
      (carry, ys), notes = body([*consts, *x, *carry])
      return carry, (ys, notes)

    if layout:
      given = [*body.closed_over, *consts], init, xs
      carry, (ys, notes) = run.run_scan(selection, layout, *given, **options)
    else:
      carry, (ys, notes) = lax.scan(iteration, init, xs, **options)
    return [*carry, *ys], notes.reduce_iterations()


def _prepare_scans(
  steps: Sequence[Step], options: choose.Options, prefix: str, repeats: int
) -> dict[Step, _ScanStep]:
  """Traces the bodies of all scans and selects their residuals."""
  # This happens before the program is traced with its backward pass. A trace
  # may run any number of times, so it should have no side effects; and a body
  # depends on the types of its operands alone. Under a budget, a loop in the
  # body of a loop may be run again as a whole. It then saves whatever its
  # matmuls give, for one iteration of the outer loop.
  if repeats > 1 and options.memory_budget is not None:
    options = options._replace(memory_budget=math.inf)
  scans: dict[Step, _ScanStep] = {}
  for step in steps:
    if step.name == "scan":
      inner_prefix = f"{prefix}scan_{len(scans)}/"
      body = _trace_body(step.params, options, inner_prefix, repeats)
      scans[step] = _ScanStep(body, step.params)
  return scans


def _trace_body(
  params: Mapping[str, Any], options: choose.Options, prefix: str, repeats: int
) -> TracedFunction:
  """Traces a scan's body as a function of (consts, x, carry)."""
  # Consts and rows of xs are always live in the body: the scan's backward pass
  # reads both, and the cut of the enclosing function decides how they are
  # saved.
  jaxpr, _, carried = core.scan_parts(params)

  def body(consts: Any, x: Any, carry: Any) -> Any:
    outs = core.jax_core.jaxpr_as_fun(jaxpr)(*consts, *carry, *x)
    return outs[:carried], outs[carried:]

  args = _group_operands([a.strip_weak_type() for a in jaxpr.in_avals], params)
  repeats *= params["length"]
  return TracedFunction(body, args, (0, 1), options, prefix, repeats)


def _group_operands(
  operands: Sequence[Any], params: Mapping[str, Any]
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


class Passes:
  """Runs both passes of a function (params, x) for `OptimizerInBackward`."""

  def __init__(
    self,
    fn: Callable[[PyTree, PyTree], PyTree],
    likes: Sequence[PyTree],
    options: choose.Options,
    repeats: int = 1,
  ):
    # likes: arrays or shapes of both. repeats: times that the forward pass runs
    # before the first backward pass, each with residuals of its own.
    self._traced = trace_in_budget(fn, likes, 0, options, repeats)
    trees: list[Any] = [jax.tree.structure(like) for like in likes]
    self._params, self._x = trees

  def residual_names(self) -> list[str]:
    """Returns the names of all residuals that a rule may match."""
    return self._traced.residual_names()

  def saved_residuals(self) -> list[choose.Residual]:
    """Returns the residuals whose encoded buffers `forward` returns."""
    return [*self._traced.selection.saved.values()]

  def forward(
    self, params: PyTree, x: PyTree, *, transfer: bool = True
  ) -> tuple[PyTree, list[choose.Buffers]]:
    """Returns the output, and the encoded buffers of each residual."""
    # transfer: whether to copy offloaded residuals to the host.
    traced = self._traced
    inputs = [*traced.closed_over, *jax.tree.leaves((params, x))]
    (outs, _), buffers = run.forward(
      traced.selection, inputs, transfer=transfer
    )
    return traced.result.fill(outs), buffers

  def backward(
    self,
    params: PyTree,
    buffers: list[choose.Buffers],
    ct: PyTree,
    *,
    transfer: bool = True,
  ) -> tuple[PyTree, PyTree]:
    """Returns the cotangents of the parameters and of the input."""
    # transfer: whether offloaded residuals are on the host, to be fetched.
    traced = self._traced
    not_saved = [None] * self._x.num_leaves
    inputs = [*traced.closed_over, *jax.tree.leaves(params), *not_saved]
    cts = traced.select_cotangents(jax.tree.leaves(ct))
    grads = run.backward(
      traced.selection, inputs, buffers, cts, transfer=transfer
    )[len(traced.closed_over) :]
    count = self._params.num_leaves
    return self._params.unflatten(grads[:count]), self._x.unflatten(
      grads[count:]
    )
