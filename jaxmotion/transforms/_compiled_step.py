"""Jitted training step that checks what it is given."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxmotion import core
from jaxmotion.core import Array, PyTree
from jaxmotion.transforms import _staged_step, _step_keys


def compile_run(
  run_step: Callable[..., tuple[PyTree, PyTree, PyTree, PyTree]],
  mesh: Mesh,
  *,
  stateful: bool,
  donate: bool,
  call: Callable[..., Any] | None = None,
  overlaps: bool = False,
) -> Callable[..., Any]:
  """Returns the jitted step of a builder, with checks of its arguments."""

  def step_params(
    params: PyTree,
    opt_state: PyTree,
    batch: PyTree,
    *,
    key: Array | None = None,
    **extra_args: Any,
  ) -> tuple[PyTree, PyTree, PyTree]:
    params, _, opt_state, metrics = run_step(
      params, None, opt_state, batch, key, extra_args
    )
    return params, opt_state, metrics

  def step_model(
    params: PyTree,
    model_state: PyTree,
    opt_state: PyTree,
    batch: PyTree,
    *,
    key: Array | None = None,
    **extra_args: Any,
  ) -> tuple[PyTree, PyTree, PyTree, PyTree]:
    return run_step(params, model_state, opt_state, batch, key, extra_args)

  if stateful:
    names: tuple[str, ...] = ("params", "model_state", "opt_state", "batch")
    return compile_step(step_model, names, mesh, donate, call, overlaps)
  names = ("params", "opt_state", "batch")
  return compile_step(step_params, names, mesh, donate, call, overlaps)


def compile_step(
  step: Callable[..., Any],
  names: tuple[str, ...],
  mesh: Mesh,
  donate: bool,
  call: Callable[..., Any] | None = None,
  overlaps: bool = False,
) -> Callable[..., Any]:
  """Jits a step that checks what it is given."""
  donated = names[:-1] if donate else ()
  jitted = jax.jit(step, donate_argnums=tuple(range(len(donated))))
  if overlaps:
    call = _staged_step.StagedStep(step, jitted, mesh, len(donated))
  in_flight = core.StepsInFlight(mesh)

  @functools.wraps(step)
  def checked_step(*args: Any, **kwargs: Any) -> Any:
    # JAX donates only what is given by position.
    rest = names[len(args) :]
    args += tuple(kwargs.pop(name) for name in rest if name in kwargs)
    given = dict(zip(names, args, strict=False))
    core.check_buffers(given | kwargs, donated)
    _step_keys.check_step_key(kwargs.get("key"))
    in_flight.wait(args[:1])
    try:
      run = call if call and not _has_tracer((args, kwargs)) else jitted
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


def _has_tracer(tree: PyTree) -> bool:
  return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))
