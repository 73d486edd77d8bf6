"""Linen modules that save fewer bytes for their backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax.core import lift
from flax.linen import transforms

from jaxmotion import core, perfmodel
from jaxmotion.memory import residuals


@core.declare(target=core.function)
def compress_residuals(
  target: Callable[..., Any],
  codec: residuals.Action
  | residuals.ResidualRules
  | residuals.ResidualChoice = None,
  *,
  memory_budget: float | None = None,
  device: perfmodel.Device | None = None,
) -> Any:
  """Lifts a module class or method to save fewer bytes for gradients.

  It takes the place of `nn.remat`, and is `memory.compress_residuals` for
  Linen: mutable collections such as batch statistics are updated, and random
  streams advance, as without it. All variables count as parameters, which
  stay in memory anyway.

  Args:
    target: subclass of `nn.Module`, or a method that takes a module first.
    codec: how residuals are saved; see `memory.compress_residuals`.
    memory_budget: most bytes of residuals; see `memory.compress_residuals`.
    device: device whose times are predicted; None for an H100.

  Returns:
    A module class or a method, with the arguments of `target`.

  Raises:
    TypeError: `target` is no class or function, or `codec` of a wrong type.
    ValueError: `memory_budget` is negative, or below the fewest bytes.

  Example:
    >>> import flax.linen as nn
    >>> import jax, jax.numpy as jnp
    >>> from jaxmotion import codecs
    >>> dense = compress_residuals(nn.Dense, codecs.uniform(bits=8))(4)
    >>> variables = dense.init(jax.random.key(0), jnp.ones((2, 3)))
    >>> dense.apply(variables, jnp.ones((2, 3))).shape
    (2, 4)
  """
  options: dict[str, Any] = {
    "codec": codec,
    "memory_budget": memory_budget,
    "device": device,
  }
  residuals.compress_residuals(lift.pack, **options)  # Checks.

  def lift_compressed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Lifts a function of a scope, as Flax lifts `remat`."""

    def inner(
      scope_fn: Any,
      repack_fn: Any,
      variable_groups: Any,
      rng_groups: Any,
      *args: Any,
      **kwargs: Any,
    ) -> Any:
      """Calls the function on arrays of the scope, residuals compressed."""

      def run(variable_groups: Any, rng_groups: Any, *args: Any) -> Any:
        scope = scope_fn(variable_groups, rng_groups)
        result = fn(scope, *args, **kwargs)
        return result, repack_fn(scope)

      run_compressed = residuals.compress_residuals(run, **options)
      return run_compressed(variable_groups, rng_groups, *args)

    return lift.pack(
      inner,
      (True,),
      (True,),
      (True,),
      name="compress_residuals",
      enable_kwargs=True,
    )

  return transforms.lift_transform(lift_compressed, target)
