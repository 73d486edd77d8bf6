"""Valid calls of public functions, and the walk that finds the functions."""

from __future__ import annotations

import fnmatch
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxmotion.core import to_varying


class Lazy(NamedTuple):
  """An argument that is made when it is needed, not when a table is read."""

  make: Callable[[], Any]


class Call:
  """One valid call.

  Args:
    *args: positional arguments; numpy arrays become those of JAX.
    on: the bound method or function to call; by default the function or class
      that the call's name says.
    mesh: names of the axes, of two workers each, in which it is called.
    varying: arguments that differ between workers.
    traced: whether to trace the call: nothing is compiled or run. By default
      what its table says (`TRACED`), or whether there is `on`.
    given: arguments by name, of which the call takes those that it has; by
      default those of its table.
    **kwargs: arguments by name.
  """

  def __init__(
    self,
    *args: Any,
    on: Any = None,
    mesh: Sequence[str] = (),
    varying: Sequence[str] = ("x",),
    traced: bool | None = None,
    given: Mapping[str, Any] | None = None,
    **kwargs: Any,
  ):
    self.on, self.mesh, self.varying = on, tuple(mesh), varying
    self.traced, self.given = traced, given
    self._args, self._kwargs = args, kwargs

  def target(self, name: str) -> Callable[..., Any]:
    """Returns the function or bound method."""
    return find_public(name) if self.on is None else _make(self.on)

  def make(self, name: str) -> Any:
    """Returns the result."""
    target = self.target(name)
    bound = self.bind(target)
    return target(*bound.args, **bound.kwargs)

  def bind(self, target: Callable[..., Any]) -> inspect.BoundArguments:
    """Returns the valid arguments by name, with defaults."""
    signature = inspect.signature(target)
    given, kinds = self.given or {}, signature.parameters
    taken = signature.bind_partial(*self._args).arguments
    kwargs = {k: a for k, a in given.items() if k in kinds and k not in taken}
    args = [_make(a) for a in self._args]
    kwargs = {k: _make(a) for k, a in (kwargs | self._kwargs).items()}
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound

  def run(
    self, target: Callable[..., Any], bound: inspect.BoundArguments
  ) -> BaseException | None:
    """Calls, and returns what was raised."""
    raised: list[BaseException] = []

    def body() -> None:
      try:
        for name in self.varying if self.mesh else ():
          if name in bound.arguments:
            value = bound.arguments[name]
            bound.arguments[name] = _vary(value, self.mesh)
        target(*bound.args, **bound.kwargs)
      except Exception as error:
        raised.append(error)

    if not (self.traced or self.mesh):
      body()
    elif not self.mesh:
      jax.eval_shape(body)
    else:
      shape = (2,) * len(self.mesh)
      devices = np.array(jax.devices()[: 2 ** len(shape)]).reshape(shape)
      mesh = jax.sharding.Mesh(devices, self.mesh)
      specs = dict(in_specs=(), out_specs=PartitionSpec())
      jax.eval_shape(jax.shard_map(body, mesh=mesh, **specs))
    return raised[0] if raised else None


def _make(value: Any) -> Any:
  value = value.make() if isinstance(value, Lazy) else value
  return jnp.asarray(value) if isinstance(value, np.ndarray) else value


def _vary(value: Any, axes: tuple[str, ...]) -> Any:
  leaves = jax.tree.leaves(value)
  if leaves and all(isinstance(a, jax.Array | np.ndarray) for a in leaves):
    return to_varying(value, axes)
  return value


def find_public(name: str) -> Any:
  """Returns the function or class of a name such as "wire.Ledger"."""
  value: Any = importlib.import_module("jaxmotion")
  for part in name.split("."):
    if not hasattr(value, part):
      importlib.import_module(f"{value.__name__}.{part}")
    value = getattr(value, part)
  return value


class Table(NamedTuple):
  """The calls of a room, from its module of this folder.

  Attributes:
    calls: valid calls by name. A function or method that takes nothing but what
      all calls of the module are given (`GIVEN`) is called without a row, on
      the module's instance of its class (`INSTANCES`).
    uncalled: why others are not called, by name or pattern.
    accepted: which values that look wrong are right.
    known_bad: which arguments are still to be mended.
  """

  calls: dict[str, Call]
  uncalled: Mapping[str, str]
  accepted: Mapping[tuple[str, str], Mapping[str, str]]
  known_bad: Collection[tuple[str, str]]


def read_table(room: str) -> Table:
  """Returns the table of a room; what its module leaves out is empty."""
  module = vars(importlib.import_module(f"tests.arguments.{room}"))
  uncalled, instances = (module.get(n, {}) for n in ("UNCALLED", "INSTANCES"))
  calls = dict(module.get("CALLS", {}))
  for name in public_names(room):
    if not any(fnmatch.fnmatch(name, pattern) for pattern in uncalled):
      calls.setdefault(name, Call())
  for name, call in calls.items():
    owner, _, method = name.removeprefix(f"{room}.").rpartition(".")
    if call.on is None and owner in instances:
      on = lambda o=instances[owner], m=method: getattr(_make(o), m)
      call.on = Lazy(on)
    if call.given is None:
      call.given = module.get("GIVEN", {})
    if call.traced is None:
      call.traced = module.get("TRACED", call.on is not None)
  accepted, known_bad = module.get("ACCEPTED", {}), module.get("KNOWN_BAD", ())
  return Table(calls, uncalled, accepted, known_bad)


def public_names(room: str) -> Iterator[str]:
  """Yields the functions, classes and methods of a room that have arguments."""
  package = importlib.import_module(f"jaxmotion.{room}")
  names = [room]
  for module in pkgutil.iter_modules(package.__path__, f"{room}."):
    # Folders of kernels are ops of their own; those of other rooms are floors.
    if module.name == f"{room}.extend" or (module.ispkg and room == "kernels"):
      names.append(module.name)
  for module_name in names:
    module = importlib.import_module(f"jaxmotion.{module_name}")
    for name, value in vars(module).items():
      where = getattr(value, "__module__", None) or ""
      if name.startswith("_") or not where.startswith(f"jaxmotion.{room}"):
        continue
      found = {}
      if inspect.isfunction(value):
        found[name] = value
      elif inspect.isclass(value):
        # A NamedTuple is a record of results, whose fields nothing can check;
        # an exception is raised, not made.
        if not issubclass(value, tuple | BaseException):
          found[name] = value
        for method, function in vars(value).items():
          if inspect.isfunction(function) and not method.startswith("_"):
            found[f"{name}.{method}"] = function
      for path, target in found.items():
        if inspect.signature(target).parameters.keys() - {"self"}:
          yield f"{module_name}.{path}"
