"""Functions whose operations JAX traces without tracing functions for them."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxmotion.core import _types


def trace_in_place(
  fn: Callable[..., _types.PyTree],
) -> Callable[..., _types.PyTree]:
  """Returns a function that writes its operations into the enclosing trace.

  Functions of `jax.numpy` are jitted one by one. JAX traces each of them for
  each type of operand, and writes a call or copies the equations. An encoder
  has tens of them, and is traced in half the time without. The values are the
  same. Outside of traces nothing changes.

  Args:
    fn: function of trees, without loops: they would be unrolled.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> clip = lambda x: jnp.clip(x, 0, 1)
    >>> def list_operations(fn):
    ...   return [e.primitive.name for e in jax.make_jaxpr(fn)(2.0).eqns]
    >>> list_operations(clip), list_operations(trace_in_place(clip))
    (['jit'], ['max', 'min'])
  """

  @functools.wraps(fn)
  def wrapped(*args: Any, **kwargs: Any) -> _types.PyTree:
    leaves = jax.tree.leaves((args, kwargs))
    if not any(isinstance(x, jax.core.Tracer) for x in leaves):
      return fn(*args, **kwargs)
    with jax.disable_jit():
      return fn(*args, **kwargs)

  return wrapped
