"""Jitted training step that checks what it is given."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxmotion.core import StepsInFlight, check_arrays, check_buffers
from jaxmotion.transforms._step_keys import check_step_key


def compile_step(
  step: Callable[..., Any], names: tuple[str, ...], mesh: Mesh, donate: bool
) -> Callable[..., Any]:
  """Returns the jitted step, with checks of its arguments.

  Args:
    step: function of the arguments with these names, and of keywords.
    names: positional arguments; all but the last, the batch, may be donated.
    mesh: devices that the step runs on.
    donate: whether to donate them.
  """
  donated = names[:-1] if donate else ()
  jitted = jax.jit(step, donate_argnums=tuple(range(len(donated))))
  in_flight = StepsInFlight(mesh)

  @functools.wraps(step)
  def checked_step(*args: Any, **kwargs: Any) -> Any:
    # JAX donates only what is given by position.
    rest = names[len(args) :]
    args += tuple(kwargs.pop(name) for name in rest if name in kwargs)
    given = dict(zip(names, args, strict=False))
    check_buffers(given | kwargs, donated)
    check_step_key(kwargs.get("key"))
    in_flight.wait(args[:1])
    try:
      results = jitted(*args, **kwargs)
    except (TypeError, ValueError, OverflowError):
      # Only after an error: a step shall not look at every leaf.
      for name, tree in (given | kwargs).items():
        check_arrays(name, tree)
      raise
    in_flight.add(results[-1])
    return results

  for name in ("lower", "trace", "eval_shape"):
    setattr(checked_step, name, getattr(jitted, name))
  return checked_step
