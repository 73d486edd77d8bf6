"""Jitted training step that checks what it is given."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from jaxmotion import core, hosts, program
from jaxmotion.core import PyTree
from jaxmotion.transforms.step import _step_arguments


class StepCalls:
  """Guards the calls of a jitted step, which a loop makes one after another."""

  def __init__(self, mesh: Mesh, *, has_static: bool = False):
    # has_static: whether arguments may be named as static.
    self._mesh, self._has_static = mesh, has_static
    self._in_flight = hosts.StepsInFlight(mesh)

  @contextlib.contextmanager
  def guard(
    self,
    given: Mapping[str, PyTree],
    donated: Collection[str],
    unplaced: Collection[str],
  ) -> Iterator[None]:
    """Checks buffers and waits before a call, and explains its errors."""
    # given: all arguments by name. unplaced: names of those that nothing puts
    # on the mesh before the call.
    core.check_buffers(given, donated)
    self._in_flight.wait(given)
    try:
      yield
    except (TypeError, ValueError, OverflowError):
      # Only after an error: a step shall not look at every leaf.
      self.check_arrays(given)
      core.check_on_mesh({name: given[name] for name in unplaced}, self._mesh)
      raise

  def add(self, results: PyTree) -> None:
    """Remembers a call by a result that is not donated."""
    self._in_flight.add(results)

  def check_arrays(self, given: Mapping[str, PyTree]) -> None:
    """Raises if an argument that is traced has leaves that are no arrays."""
    for name, tree in given.items():
      try:
        core.check_arrays(name, tree)
      except TypeError as error:
        if not self._has_static:
          raise
        raise TypeError(
          f"{error} Name it in `static_argnames` if it is no data."
        ) from None


def copy_methods(
  step: Callable[..., Any],
  jitted: Any,
  place: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]],
) -> None:
  """Gives a step the methods of its jitted function."""
  # place: (args, kwargs) of the step -> arguments of the jitted function.

  def call_method(name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(jitted, name)(*place(args, kwargs))

  for name in ("lower", "trace", "eval_shape"):
    setattr(step, name, functools.partial(call_method, name))


def compile_step(
  step: Callable[..., Any],
  mesh: Mesh,
  *,
  donates: bool = False,
  prepare: Callable[[dict[str, Any]], dict[str, Any]] = dict,
  call: Callable[..., Any] | None = None,
  overlaps: bool = False,
) -> Any:
  """Jits a step that checks what it is given."""
  # donates: whether the first argument is donated. `prepare` checks and
  # converts arguments that are given by keyword. `call` runs the step instead;
  # `overlaps` lets it run as several programs.
  names = list(inspect.signature(step).parameters)[:2]
  jitted = jax.jit(step, donate_argnums=0 if donates else ())
  if overlaps:
    call = hosts.StagedStep(step, jitted, mesh, int(donates))
  calls = StepCalls(mesh)
  read: set[str] = {"key", "counts"}

  @functools.wraps(step)
  def checked_step(*args: Any, **kwargs: Any) -> Any:
    # JAX donates only what is given by position.
    rest = names[len(args) :]
    args += tuple(kwargs.pop(name) for name in rest if name in kwargs)
    kwargs = prepare(kwargs)
    _step_arguments.check_step_key(kwargs.get("key"))
    given = dict(zip(names, args, strict=False)) | kwargs
    # A look at every leaf, which only some steps need.
    is_new = not kwargs.keys() <= read
    is_traced = (is_new or call) and any(
      isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(given)
    )
    with calls.guard(given, names[: int(donates)], given):
      if is_new and not is_traced:
        _check_read(jitted.trace(*args, **kwargs).jaxpr, args, kwargs, read)
        read.update(kwargs)
      run = call if call and not is_traced else jitted
      results = run(*args, **kwargs)
    calls.add(results[-1])
    return results

  for name in ("lower", "trace", "eval_shape"):
    setattr(checked_step, name, getattr(jitted, name))
  return checked_step


def _check_read(
  jaxpr: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: set[str]
) -> None:
  """Raises for an extra argument that changes no result of a step."""
  if jaxpr.effects:  # A callback may read it.
    return
  # Each argument counts as an axis, over which what depends on it varies.
  marks = [frozenset[Any]()] * len(jax.tree.leaves(args))
  # As `jax.jit` flattens arguments by keyword.
  for name in sorted(kwargs):
    own = frozenset([("argument", name)])
    marks += [own] * len(jax.tree.leaves(kwargs[name]))
  found = program.find_varying(jaxpr, marks, frozenset().union(*marks))
  for name in sorted(kwargs.keys() - known):
    if all(("argument", name) not in axes for axes in found):
      raise TypeError(
        f"`{name}` must be an argument of the step or of the chain's update, "
        "got one that changes no result. The step itself takes `key` and "
        "`counts`."
      )
