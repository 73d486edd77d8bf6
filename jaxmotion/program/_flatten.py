"""Flattens a traced function into one list of steps on values.

This is the only place that walks jaxprs. What its users do with the steps
differs: wire counts collectives, the performance model counts FLOPs and bytes,
residuals are chosen among the values, the planner looks for loops.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.program import _primitives

# Their results are equal on all workers of the axes that they name.
_EQUALIZING = frozenset(
  """
  all_gather all_gather_invariant assert_replicated pmax pmin psum psum2
  psum_invariant
  """.split()
)
# Their results differ between workers, whatever the operands are.
_DISTINCT = frozenset("all_to_all axis_index ppermute reduce_scatter".split())
# They write to a reference, which is their first operand.
_WRITES = frozenset("addupdate swap".split())


class Value:
  """Describes one array of a program."""

  __slots__ = ("_nbytes", "aval", "source", "viewed")

  def __init__(self, aval: Any, viewed: Value | None = None):
    # Shape, dtype and the mesh axes over which it varies.
    self.aval = aval
    # The value that this one is a view of, or None; its value in memory.
    self.viewed = viewed
    self.source: Value = self if viewed is None else viewed.source
    self._nbytes: int | None = None

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the array; () of what is no array."""
    return tuple(getattr(self.aval, "shape", ()))

  @property
  def size(self) -> int:
    """Number of elements of the array."""
    return math.prod(self.shape)

  @property
  def dtype(self) -> str:
    """Name of the element type; "none" of what is no array."""
    dtype = getattr(self.aval, "dtype", None)
    return "none" if dtype is None else str(dtype)

  @property
  def nbytes(self) -> int:
    """Bytes of all elements."""
    if self._nbytes is None:
      self._nbytes = array_bytes(self.aval)
    return self._nbytes


Operand: TypeAlias = "Value | core.jax_core.Literal"


@dataclasses.dataclass(eq=False, slots=True)
class Step:
  """Describes one operation of a flat program."""

  eqn: core.jax_core.JaxprEqn  # Of the jaxpr that holds the step.
  ins: tuple[Operand, ...]  # Literals are constants of the program's text.
  outs: tuple[Value, ...]
  # Workers along each mesh axis that an enclosing `shard_map` binds.
  sizes: Mapping[Any, int]
  # Names of `jax.named_scope` around the call that was inlined.
  scope: core.source_info_util.NameStack
  name: str = dataclasses.field(init=False)  # Of the primitive.
  # Operands by position; None is a literal.
  arrays: tuple[Value | None, ...] = dataclasses.field(init=False)
  reads: tuple[Value, ...] = dataclasses.field(init=False)

  def __post_init__(self) -> None:
    self.name = self.eqn.primitive.name
    self.arrays = tuple(v if isinstance(v, Value) else None for v in self.ins)
    self.reads = tuple(v for v in self.arrays if v is not None)

  @property
  def params(self) -> Mapping[str, Any]:
    """Parameters of the equation."""
    return self.eqn.params

  @property
  def axis_names(self) -> tuple[Any, ...]:
    """Mesh axes that the equation names; `vmap` leaves positions (ints)."""
    names = self.params.get("axes", self.params.get("axis_name", ()))
    return tuple(names) if isinstance(names, (tuple, list)) else (names,)

  def run(self, operands: Sequence[Any]) -> Sequence[Any]:
    """Runs or traces the operation, and returns its results."""
    primitive = self.eqn.primitive
    with self.named(), self.eqn.ctx.manager:
      params = primitive.get_bind_params(self.eqn.params)
      out = primitive.bind(*operands, **params)
    return out if primitive.multiple_results else [out]

  def named(self) -> AbstractContextManager[None]:
    """Returns a context in which operations have this step's scopes."""
    # Profiles show operations by these names, so a replay must keep them. It
    # gets the marks of differentiation anew.
    source, names = self.eqn.source_info, core.source_info_util
    scope = (self.scope + source.name_stack).stack
    kept = tuple(p for p in scope if p.name not in ("jvp", "transpose"))
    stack = names.current_name_stack() + names.NameStack(kept)
    return names.user_context(source.traceback, name_stack=stack)


class Program(NamedTuple):
  """Holds a flat program and the constants in it."""

  inputs: tuple[Value, ...]
  steps: tuple[Step, ...]  # In order.
  outputs: tuple[Operand, ...]  # A literal is a constant.
  # Arrays that are part of the program; None where the jaxpr came without them.
  constants: dict[Value, Any]
  # Primitives that hold one jaxpr, are not known to be calls, and are taken to
  # run it once.
  guessed: tuple[str, ...]
  # Operands of inlined calls of `jax.checkpoint`, as seen inside. A barrier
  # keeps what is run again apart from what ran before.
  sealed: frozenset[Value] = frozenset()


def flatten(
  jaxpr: Any,
  *,
  calls: str = "transparent",
  backend: str | None = None,
  used: Sequence[bool] | None = None,
  sizes: Mapping[Any, int] | None = None,
) -> Program:
  """Writes the calls in a traced function out."""
  # calls: "transparent" inlines calls without a meaning of their own (`jit`,
  # unless a compiler may not inline it) and keeps every step, so that the steps
  # can be run. "sending" also inlines calls that hold a collective, and those
  # with a rule of differentiation. "all" inlines every call, `remat` and
  # `shard_map` included, and drops steps whose results nobody uses.
  # backend: whose branch of `lax.platform_dependent` is inlined, but with
  # "transparent"; None leaves it a `cond`.
  # used: which outputs count as used with "all"; None: every one.
  # sizes: workers along the mesh axes bound around the jaxpr.
  flat = _Flattener(calls, backend)
  inputs = tuple(Value(v.aval) for v in open_jaxpr(jaxpr).invars)
  scope = core.source_info_util.new_name_stack()
  outputs = flat.inline(jaxpr, inputs, dict(sizes or {}), scope)
  steps = flat.steps
  if calls == "all":
    wanted = outputs if used is None else itertools.compress(outputs, used)
    steps = _live_steps(steps, wanted)
  return Program(
    inputs,
    tuple(steps),
    tuple(outputs),
    flat.constants,
    tuple(flat.guessed),
    frozenset(flat.sealed),
  )


class _Flattener:
  """Collects the steps and constants that one `flatten` finds."""

  def __init__(self, calls: str, backend: str | None):
    self.steps: list[Step] = []
    self.constants: dict[Value, Any] = {}
    self.guessed: list[str] = []
    self.sealed: set[Value] = set()
    self._calls = calls
    self._backends = {"cuda", "rocm"} if backend == "gpu" else {backend}

  def inline(
    self,
    jaxpr: Any,
    ins: Sequence[Operand],
    sizes: dict[Any, int],
    scope: core.source_info_util.NameStack,
  ) -> list[Operand]:
    """Appends the steps of a jaxpr that is called with these operands."""
    opened = open_jaxpr(jaxpr)
    env: dict[core.jax_core.Var, Operand] = {
      var: _as_seen(var.aval, v)
      for var, v in zip(opened.invars, ins, strict=True)
    }
    arrays = getattr(jaxpr, "consts", None) or [None] * len(opened.constvars)
    for var, array in zip(opened.constvars, arrays, strict=True):
      value = env[var] = Value(var.aval)
      self.constants[value] = array

    def read(atom: Any) -> Operand:
      return atom if isinstance(atom, core.jax_core.Literal) else env[atom]

    for eqn in opened.eqns:
      operands = tuple(map(read, eqn.invars))
      call = self._callee(eqn)
      if call is None:
        made = tuple(
          Value(v.aval, _viewed(eqn.primitive.name, operands, i))
          for i, v in enumerate(eqn.outvars)
        )
        self.steps.append(Step(eqn, operands, made, sizes, scope))
        env.update(zip(eqn.outvars, made, strict=True))
        continue
      # The first operand of a `cond` says which branch is taken.
      own = operands[len(operands) - len(open_jaxpr(call).invars) :]
      if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
        # The call is lowered with a barrier before its operands.
        own = tuple(
          Value(v.aval, v) if isinstance(v, Value) else v for v in own
        )
        self.sealed.update(v for v in own if isinstance(v, Value))
      mesh = dict(getattr(eqn.params.get("mesh"), "shape", {}))
      inner = scope + eqn.source_info.name_stack
      outs = self.inline(call, own, {**sizes, **mesh} if mesh else sizes, inner)
      for var, out in zip(eqn.outvars, outs, strict=True):
        env[var] = _as_seen(var.aval, out)
    return [read(atom) for atom in opened.outvars]

  def _callee(self, eqn: core.jax_core.JaxprEqn) -> Any:
    """Returns the jaxpr that an equation calls and that is to be inlined."""
    name = eqn.primitive.name
    # A compiler may be told not to inline a call.
    metadata = eqn.ctx.xla_metadata or {}
    is_inlined = self._calls == "all" or metadata.get("inlineable") != "false"
    if name in _primitives.TRANSPARENT_CALLS and is_inlined:
      return eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]
    if self._calls == "transparent":
      return None
    is_rule = name.startswith(("custom_jvp_call", "custom_vjp_call"))
    if self._calls == "sending" and not (is_rule or is_sending(eqn)):
      return None
    inner = inner_jaxprs(eqn)
    platforms = eqn.params.get("branches_platforms")
    if platforms is not None and None not in self._backends:
      # The branch of this backend, or the one of all others.
      return next(
        branch
        for branch, names in zip(inner, platforms, strict=True)
        if names is None or self._backends.intersection(names)
      )
    if name in _primitives.LOOPS or len(inner) != 1:
      return None
    (call,) = inner
    opened = open_jaxpr(call)
    if len(opened.invars) != len(eqn.invars) or (
      len(opened.outvars) != len(eqn.outvars)
    ):
      return None
    if name not in _primitives.CALLS:
      self.guessed.append(name)
    return call


def _as_seen(aval: Any, operand: Operand) -> Operand:
  """Returns an operand under the shape that it has inside or outside a call."""
  # Inside a `shard_map` an array is seen as a part of itself.
  if not isinstance(operand, Value):
    return operand
  if operand.shape == tuple(getattr(aval, "shape", ())):
    return operand
  return Value(aval, operand)


def _viewed(
  name: str, operands: tuple[Operand, ...], index: int
) -> Value | None:
  """Returns the operand that result `index` is a view of, if it is one."""
  if name not in _primitives.VIEWS:
    return None
  many = name in ("optimization_barrier", "pcast")
  operand = operands[index if many else 0]
  return operand if isinstance(operand, Value) else None


def _live_steps(steps: list[Step], wanted: Iterable[Operand]) -> list[Step]:
  """Drops steps without effects whose results no later step uses."""
  live: set[int] = set()

  def use(value: Operand | None) -> None:
    # No step makes what is seen inside of a call: that is a view of an operand.
    while isinstance(value, Value) and id(value) not in live:
      live.add(id(value))
      value = value.viewed

  for output in wanted:
    use(output)
  kept = []
  for step in reversed(steps):
    if has_effects(step.eqn) or any(id(v) in live for v in step.outs):
      kept.append(step)
      for value in step.reads:
        use(value)
  return kept[::-1]


def has_effects(eqn: core.jax_core.JaxprEqn) -> bool:
  """Says whether an equation must run even if nobody uses its results."""
  # Collectives carry the effect of naming an axis, and may yet be dropped.
  return any(type(e).__name__ != "NamedAxisEffect" for e in eqn.effects)


def is_sending(eqn: core.jax_core.JaxprEqn) -> bool:
  """Says whether an equation is a collective, or holds one."""
  if _primitives.collective_name(eqn.primitive.name) in _primitives.COLLECTIVES:
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return axes not in ((), [])
  return any(
    is_sending(inner)
    for jaxpr in inner_jaxprs(eqn)
    for inner in open_jaxpr(jaxpr).eqns
  )


def has_barriers(jaxpr: Any) -> bool:
  """Says whether a program has barriers, loops' bodies not looked at."""
  for eqn in open_jaxpr(jaxpr).eqns:
    name = eqn.primitive.name
    # `jax.checkpoint` makes barriers, unless it is told that nothing outside
    # could be confused with what it repeats.
    if name == "optimization_barrier" or eqn.params.get("prevent_cse"):
      return True
    if name in _primitives.CALLS and any(map(has_barriers, inner_jaxprs(eqn))):
      return True
  return False


def open_jaxpr(jaxpr: Any) -> Any:
  """Returns the jaxpr inside a closed one; its constants are `constvars`."""
  return getattr(jaxpr, "jaxpr", jaxpr)


def inner_jaxprs(eqn: core.jax_core.JaxprEqn) -> list[Any]:
  """Returns the jaxprs of an equation that are parts of the program."""
  name = eqn.primitive.name
  # Most are known to hold none, and are not searched.
  if name in _primitives.CHEAP or name.startswith(_primitives.FOLDING):
    return []
  # Of a linear solve's four functions only one is part of the program.
  solve = getattr(eqn.params.get("jaxprs"), "solve", None)
  return list(_jaxprs(eqn.params.values())) if solve is None else [solve]


def _jaxprs(values: Iterable[Any]) -> Iterable[Any]:
  for value in values:
    if isinstance(value, (core.jax_core.Jaxpr, core.jax_core.ClosedJaxpr)):
      yield value
    elif isinstance(value, (tuple, list)):
      yield from _jaxprs(value)


def array_bytes(aval: Any, dropped: frozenset[int] = frozenset()) -> int:
  """Returns the bytes of an array, without some of its dimensions."""
  dtype = getattr(aval, "dtype", None)
  if dtype is None or dtype == jax.dtypes.float0:
    # No array, such as a token, or the cotangent of integers.
    return 0
  bits: int
  if jnp.issubdtype(dtype, jax.dtypes.extended):
    bits = 8 * int(dtype.itemsize)
  else:
    bits = int(jax.dtypes.itemsize_bits(dtype))
  # dropped: positions of dimensions.
  size = math.prod(n for i, n in enumerate(aval.shape) if i not in dropped)
  return -(-bits * size // 8)


def describe_equation(
  eqn: core.jax_core.JaxprEqn, kind: str | None = None
) -> str:
  """Returns words for an equation in an error, as its trace remembers it."""
  # kind: first word; None is the primitive's name.
  body = open_jaxpr(eqn.params.get("body_jaxpr"))  # Of a while loop.
  source = None if body is None else body.debug_info.func_src_info
  stack = str(eqn.source_info.name_stack)
  name = eqn.primitive.name if kind is None else kind
  parts = (name, source and f"({source})", stack and f"in {stack}")
  return " ".join(filter(None, parts))


class Order:
  """Indexes the steps of a program by the values that they make."""

  def __init__(self, steps: Sequence[Step]):
    self._steps = steps
    self._index = {step: i for i, step in enumerate(steps)}
    self._maker = {v: i for i, step in enumerate(steps) for v in step.outs}

  def maker(self, value: Value) -> Step | None:
    """Returns the step that makes a value; None of an input."""
    index = self._maker.get(value)
    return None if index is None else self._steps[index]

  def leading_to(
    self,
    wanted: Iterable[Operand],
    known: Container[Value],
    also: Iterable[Step] = (),
  ) -> list[Step]:
    """Returns the steps from known values to wanted ones, in program order."""
    # wanted: literals are ignored. also: steps without results that are to run,
    # such as debug prints.
    found = {self._index[step] for step in also}
    todo = [v for v in wanted if isinstance(v, Value)]
    todo += [v for i in found for v in self._steps[i].reads]
    while todo:
      value = todo.pop()
      index = self._maker.get(value)
      if value in known or index is None or index in found:
        continue
      found.add(index)
      todo.extend(self._steps[index].reads)
    return [self._steps[i] for i in sorted(found)]

  def follows_cheaply(self, value: Value, known: Container[Value]) -> bool:
    """Says whether cheap steps alone make a value that is not there yet."""
    # False of an input, and of a value that is known.
    if value in known or value not in self._maker:
      return False
    seen: set[Value] = set()
    todo = [value]
    while todo:
      one = todo.pop()
      if one in known or one in seen or one not in self._maker:
        continue
      step = self._steps[self._maker[one]]
      if _primitives.is_expensive(step.eqn):
        return False
      seen.add(one)
      todo.extend(step.reads)
    return True


def evaluate(steps: Sequence[Step], env: dict[Value, Any]) -> None:
  """Runs or traces steps in order, and adds what they make to `env`."""
  # env: holds all that the steps read before they make it. A value that is
  # there already stays: callers put decoded or offloaded ones there.
  for step in steps:
    results = step.run([read_operand(env, v) for v in step.ins])
    for value, result in zip(step.outs, results, strict=True):
      env.setdefault(value, result)


def read_operand(env: dict[Value, Any], operand: Operand) -> Any:
  """Returns the array of an operand."""
  if isinstance(operand, core.jax_core.Literal):
    return operand.val
  return env[operand]


# JAX types record over which axes values vary, but only in maps that check
# them, and these refuse loops that start from constants. Marks are followed
# through any program.
Marks = frozenset[Any]
# (step, marks of its operands) -> marks of its results.
Rule = Callable[[Step, Sequence[Marks]], Sequence[Marks]]


def find_varying(
  jaxpr: Any,
  varying: Sequence[Marks],
  axes: Marks,
  equal_names: frozenset[str] = frozenset(),
) -> list[Marks]:
  """Returns the axes over which each result may differ between workers."""
  # varying: for each operand the axes over which it differs. axes: names of the
  # workers' axes; others are not looked at.
  # equal_names: names that `checkpoint_name` gave to values that are equal on
  # all workers, whatever they were computed from.

  def mark_results(step: Step, ins: Sequence[Marks]) -> list[Marks]:
    """Returns the axes over which a step's results may differ."""
    name, count = _primitives.collective_name(step.name), len(step.outs)
    if name == "name" and step.params["name"] in equal_names:
      return [frozenset()]
    every, named = frozenset().union(*ins), axes & frozenset(step.axis_names)
    grouped = step.params.get("axis_index_groups") is not None
    if name in _EQUALIZING and not grouped:
      if len(ins) == count:
        return [over - named for over in ins]
      return [every - named] * count
    if name in _DISTINCT or (name in _EQUALIZING and grouped):
      every |= named
    return [every] * count

  return follow_marks(
    jaxpr, [axes.intersection(over) for over in varying], mark_results
  )


def follow_marks(jaxpr: Any, marks: Sequence[Marks], rule: Rule) -> list[Marks]:
  """Returns the marks of a program's results, from those of its operands."""
  # rule: for all steps but loops and branches, which are entered. What depends
  # on several values has the marks of all.
  program = flatten(jaxpr, calls="all")
  known: dict[Any, Marks] = dict(zip(program.inputs, marks, strict=True))

  def read(operand: Operand | None) -> Marks:
    while isinstance(operand, Value):
      if operand in known:
        return known[operand]
      operand = operand.viewed
    return frozenset()

  for step in program.steps:
    ins = [read(operand) for operand in step.ins]
    follow = _CONTROL.get(step.name)
    outs = follow(step, ins, rule) if follow else rule(step, ins)
    known.update(zip(step.outs, outs, strict=True))
    if step.name in _WRITES and not isinstance(
      step.ins[0], core.jax_core.Literal
    ):
      known[step.ins[0]] = frozenset().union(*ins)
  return [read(operand) for operand in program.outputs]


def _follow_branches(
  step: Step, ins: Sequence[Marks], rule: Rule
) -> list[Marks]:
  """Follows all branches, and adds the marks of what chooses one."""
  # Workers may take different branches.
  branches = [follow_marks(b, ins[1:], rule) for b in inner_jaxprs(step.eqn)]
  return [ins[0].union(*outs) for outs in zip(*branches, strict=True)]


def _follow_scan(step: Step, ins: Sequence[Marks], rule: Rule) -> list[Marks]:
  """Follows a loop's body until the marks of its carry stop growing."""
  body, num_consts, num_carry = core.scan_parts(step.params)
  consts, xs = ins[:num_consts], ins[num_consts + num_carry :]

  def run_body(carry: list[Marks]) -> list[Marks]:
    return follow_marks(body, [*consts, *carry, *xs], rule)

  return _grow_carry(ins[num_consts : num_consts + num_carry], run_body)


def _grow_carry(
  carry: Sequence[Marks], run_body: Callable[[list[Marks]], list[Marks]]
) -> list[Marks]:
  """Returns the marks of a loop's results, once those of its carry are all."""
  # Results begin with the carry, and marks only grow.
  while True:
    outs = run_body(list(carry))
    grown = [a | b for a, b in zip(carry, outs, strict=False)]
    if grown == list(carry):
      return grown + outs[len(grown) :]
    carry = grown


def _follow_while(step: Step, ins: Sequence[Marks], rule: Rule) -> list[Marks]:
  """Follows condition and body until the marks of the carry stop growing."""
  num_cond = step.params["cond_nconsts"]
  num_body = num_cond + step.params["body_nconsts"]
  cond_consts, consts = ins[:num_cond], ins[num_cond:num_body]
  condition, body = step.params["cond_jaxpr"], step.params["body_jaxpr"]

  def run_body(carry: list[Marks]) -> list[Marks]:
    (goes_on,) = follow_marks(condition, [*cond_consts, *carry], rule)
    # Workers that count to different numbers have different results.
    outs = follow_marks(body, [*consts, *carry], rule)
    return [out | goes_on for out in outs]

  return _grow_carry(ins[num_body:], run_body)


_CONTROL = {
  "cond": _follow_branches,
  "scan": _follow_scan,
  "while": _follow_while,
}
