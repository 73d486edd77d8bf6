"""Jitted training step that checks what it is given."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxmotion import core, hosts, program
from jaxmotion.core import PyTree
from jaxmotion.transforms.step import _step_keys


def compile_step(
  step: Callable[..., Any],
  names: tuple[str, ...],
  mesh: Mesh,
  donated: tuple[str, ...],
  prepare: Callable[[dict[str, Any]], dict[str, Any]] = dict,
  call: Callable[..., Any] | None = None,
  overlaps: bool = False,
) -> Any:
  """Jits a step that checks what it is given."""
  # `prepare` checks and converts arguments that are given by keyword.
  jitted = jax.jit(step, donate_argnums=tuple(range(len(donated))))
  if overlaps:
    call = hosts.StagedStep(step, jitted, mesh, len(donated))
  in_flight = hosts.StepsInFlight(mesh)
  read: set[str] = {"key", "counts"}

  @functools.wraps(step)
  def checked_step(*args: Any, **kwargs: Any) -> Any:
    # JAX donates only what is given by position.
    rest = names[len(args) :]
    args += tuple(kwargs.pop(name) for name in rest if name in kwargs)
    kwargs = prepare(kwargs)
    given = dict(zip(names, args, strict=False))
    core.check_buffers(given | kwargs, donated)
    _step_keys.check_step_key(kwargs.get("key"))
    in_flight.wait(args[:1])
    # A look at every leaf, which only some steps need.
    is_new = not kwargs.keys() <= read
    is_traced = (is_new or call) and _has_tracer((args, kwargs))
    try:
      if is_new and not is_traced:
        _check_read(jitted.trace(*args, **kwargs).jaxpr, args, kwargs, read)
        read.update(kwargs)
      run = call if call and not is_traced else jitted
      results = run(*args, **kwargs)
    except (TypeError, ValueError, OverflowError):
      # Only after an error: a step shall not look at every leaf.
      for name, tree in (given | kwargs).items():
        core.check_arrays(name, tree)
      core.check_on_mesh(given | kwargs, mesh)
      raise
    in_flight.add(results[-1])
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
  given = len(jax.tree.leaves(args))
  # As `jax.jit` flattens arguments by keyword.
  names = [
    name for name in sorted(kwargs) for _ in jax.tree.leaves(kwargs[name])
  ]
  for name in sorted(set(names) - known):
    marks: list[frozenset[str]] = [frozenset()] * given
    marks += [frozenset({"read"} if name == n else ()) for n in names]
    if not any(program.find_varying(jaxpr, marks, frozenset({"read"}))):
      raise TypeError(
        f"`{name}` must be an argument of the step or of the chain's update, "
        "got one that changes no result. The step itself takes `key` and "
        "`counts`."
      )


def _has_tracer(tree: PyTree) -> bool:
  return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))
