"""A function as one flat list of operations on values in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

# Their one jaxpr runs once, on their operands.
_CALLS = frozenset(
  """
  checkpoint closed_call core_call custom_jvp_call custom_vjp_call
  custom_vjp_call_jaxpr eval_jaxpr jit pjit remat remat2 shard_map
  """.split()
)
LOOPS = frozenset("scan while cond".split())
# The jaxprs these hold fold or compare two values: they are no programs.
_FOLDING = ("reduce", "scatter", "select_and", "sort", "argmax", "argmin")
# They name what is in memory already: an operation that reads them reads it.
VIEWS = frozenset(
  """
  copy copy_p dynamic_slice expand_dims optimization_barrier pcast pvary
  random_unwrap random_wrap reshape assert_replicated sharding_constraint slice
  split squeeze stop_gradient transpose unstack
  """.split()
)


class Value:
  """An array of a program: what it weighs and what it is a part of.

  Attributes:
    shape: of the array.
    dtype: name of its element type.
    size: number of elements.
    nbytes: bytes of all elements.
    source: the value in memory it is a view of, or itself.
  """

  __slots__ = ("dtype", "nbytes", "shape", "size", "source")

  def __init__(self, aval: Any, source: Value | None = None):
    self.shape: tuple[int, ...] = tuple(getattr(aval, "shape", ()))
    dtype = getattr(aval, "dtype", None)
    self.dtype = "none" if dtype is None else str(dtype)
    self.size: int = math.prod(self.shape)
    self.nbytes: int = -(-_bits(dtype) * self.size // 8)
    self.source: Value = self if source is None else source.source


class Node(NamedTuple):
  """One operation.

  Attributes:
    name: of the primitive.
    params: of the equation.
    ins: operands; None is a constant that is part of the program.
    outs: results.
    where: what to call the operation in an error.
  """

  name: str
  params: Mapping[str, Any]
  ins: tuple[Value | None, ...]
  outs: tuple[Value, ...]
  where: str


class Program(NamedTuple):
  """A flat program.

  Attributes:
    inputs: arguments and constants, in memory before the program starts.
    nodes: operations in program order, without those nobody needs.
    outputs: results; None is a constant.
    guessed: primitives that hold a jaxpr and are taken to run it once.
  """

  inputs: tuple[Value, ...]
  nodes: tuple[Node, ...]
  outputs: tuple[Value | None, ...]
  guessed: tuple[str, ...]


def trace(fn: Callable[..., Any], *args: Any, backend: str) -> Program:
  """Traces a function without running it.

  Args:
    fn: the function, jitted or not.
    *args: its arguments, pytrees of arrays or ShapeDtypeStructs.
    backend: whose code `lax.platform_dependent` takes.
  """
  traceable = fn if isinstance(fn, jax.stages.Wrapped) else jax.jit(fn)
  jaxpr = open_jaxpr(traceable.trace(*args).jaxpr)
  wanted = [True] * len(jaxpr.outvars)
  # Of loops too, which `_live` below does not look into.
  return flatten(dce_jaxpr(jaxpr, wanted, instantiate=True)[0], backend)


def flatten(jaxpr: Any, backend: str) -> Program:
  """Writes the calls of a jaxpr out and drops what nobody needs."""
  jaxpr = open_jaxpr(jaxpr)
  flat = _Flat(backend)
  arguments = (*jaxpr.constvars, *jaxpr.invars)
  inputs = tuple(Value(v.aval) for v in arguments)
  outputs = flat.run(jaxpr, dict(zip(arguments, inputs, strict=True)))
  nodes = _live(flat.nodes, outputs)
  return Program(inputs, tuple(nodes), tuple(outputs), tuple(flat.guessed))


class _Flat:
  def __init__(self, backend: str) -> None:
    self.nodes: list[Node] = []
    self.guessed: list[str] = []
    self._backends = {"gpu": ("cuda", "rocm")}.get(backend, (backend,))

  def run(
    self, jaxpr: core.Jaxpr, env: dict[Any, Value | None]
  ) -> list[Value | None]:
    for eqn in jaxpr.eqns:
      ins = tuple(_read(env, v) for v in eqn.invars)
      call = self._callee(eqn)
      if call is None:
        outs = tuple(
          Value(v.aval, _viewed(eqn.primitive.name, ins, i))
          for i, v in enumerate(eqn.outvars)
        )
        env.update(zip(eqn.outvars, outs, strict=True))
        self.nodes.append(
          Node(eqn.primitive.name, eqn.params, ins, outs, where(eqn))
        )
        continue
      inner: dict[Any, Value | None] = {
        v: Value(v.aval) for v in call.constvars
      }
      own = ins[len(ins) - len(call.invars) :]  # Not which branch is taken.
      for v, value in zip(call.invars, own, strict=True):
        inner[v] = _seen_as(v.aval, value)
      for v, value in zip(eqn.outvars, self.run(call, inner), strict=True):
        env[v] = _seen_as(v.aval, value)
    return [_read(env, v) for v in jaxpr.outvars]

  def _callee(self, eqn: Any) -> core.Jaxpr | None:
    """The jaxpr that an equation calls with its operands, if it does."""
    name = eqn.primitive.name
    inner = held(name, eqn.params)
    platforms = eqn.params.get("branches_platforms")
    if platforms is not None:
      return self._branch(inner, platforms)
    if name in LOOPS or len(inner) != 1:
      return None
    (call,) = inner
    if (len(call.invars), len(call.outvars)) != (
      len(eqn.invars),
      len(eqn.outvars),
    ):
      return None
    if name not in _CALLS:
      self.guessed.append(name)
    return call

  def _branch(self, branches: list[core.Jaxpr], platforms: Any) -> core.Jaxpr:
    """The branch of this platform, or the one of all others."""
    pairs = zip(branches, platforms, strict=True)
    return next(
      branch
      for branch, names in pairs
      if names is None or set(names) & set(self._backends)
    )


def _read(env: Mapping[Any, Value | None], v: Any) -> Value | None:
  return None if isinstance(v, core.Literal) else env[v]


def _seen_as(aval: Any, value: Value | None) -> Value | None:
  """The value as it is called inside; of a shard_map that is a part of it."""
  if value is None or value.shape == tuple(getattr(aval, "shape", ())):
    return value
  return Value(aval, value)


def _viewed(
  name: str, ins: tuple[Value | None, ...], index: int
) -> Value | None:
  """The operand that result `index` is a view of, if it is one."""
  if name not in VIEWS:
    return None
  return ins[index] if name in ("optimization_barrier", "pcast") else ins[0]


def _live(nodes: list[Node], outputs: list[Value | None]) -> list[Node]:
  wanted = {id(v) for v in outputs if v is not None}
  wanted |= {id(v.source) for v in outputs if v is not None}
  kept = []
  for node in reversed(nodes):
    if any(id(v) in wanted for v in node.outs):
      kept.append(node)
      for v in node.ins:
        if v is not None:
          wanted.update((id(v), id(v.source)))
  return kept[::-1]


def held(name: str, params: Mapping[str, Any]) -> list[core.Jaxpr]:
  """The programs among the parameters of an equation."""
  return [] if name.startswith(_FOLDING) else list(_jaxprs(params.values()))


def _jaxprs(values: Iterable[Any]) -> Iterable[core.Jaxpr]:
  for value in values:
    if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
      yield open_jaxpr(value)
    elif isinstance(value, (tuple, list)):
      yield from _jaxprs(value)


def open_jaxpr(jaxpr: Any) -> Any:
  """The jaxpr inside a closed one; its constants are `constvars`."""
  return getattr(jaxpr, "jaxpr", jaxpr)


def where(eqn: Any) -> str:
  """What to call an equation in an error, from what the trace remembers."""
  info = _body_info(eqn.params)
  source = getattr(info, "func_src_info", None)
  stack = str(eqn.source_info.name_stack)
  parts = (
    eqn.primitive.name,
    source and f"({source})",
    stack and f"in {stack}",
  )
  return " ".join(filter(None, parts))


def loop_name(node: Node) -> str:
  """The name of the function that is the body of a while loop."""
  return str(getattr(_body_info(node.params), "func_name", None))


def _body_info(params: Mapping[str, Any]) -> Any:
  return getattr(open_jaxpr(params.get("body_jaxpr")), "debug_info", None)


def _bits(dtype: Any) -> int:
  if dtype is None:
    return 0
  if jnp.issubdtype(dtype, jax.dtypes.extended):
    return 8 * int(dtype.itemsize)
  return int(jax.dtypes.itemsize_bits(dtype))
