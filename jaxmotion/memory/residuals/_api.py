"""Functions that keep little for their backward pass."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmotion.core import PyTree, check_choice
from jaxmotion.memory.residuals._traced import TracedFunction
from jaxmotion.memory.residuals.choose import (
  Action,
  Options,
  Residual,
  ResidualChoice,
  ResidualRules,
  make_choice,
)


def compress_residuals(
  fn: Callable[..., PyTree],
  codec: Action | ResidualRules | ResidualChoice = None,
  *,
  params: int | Sequence[int] = 0,
  recompute: str = "cheap",
  count_overflows: bool = False,
) -> Callable[..., PyTree]:
  """Returns a function whose backward pass needs less memory.

  Values are those of `fn`, bit for bit. What its backward pass needs is chosen
  by a minimum cut of the traced function and its backward pass: of all sets of
  values from which the rest can be computed without repeating what is costly
  (products, convolutions, reductions, loops, random bits), the one that weighs
  least as it is kept. Each of them is encoded after its last use in the forward
  pass and decoded when the backward pass first needs it; barriers hold the
  compiler to that. Bodies of `lax.scan` are treated likewise, and a maximum
  over windows keeps places of 1 to 8 bits instead of its operand.

  Without a codec nothing is rounded: the gradients are those of `fn`, bit for
  bit but for what XLA adds up in another order when it fuses otherwise. With
  one that rounds, masks and other results of comparisons are kept, as bits,
  rather than made of nothing but rounded values.

  Best put around a block of several layers, or around a whole loss. Arguments
  but `params` are kept: of a loop, wrap what it calls or what holds it; with
  `offload` the latter, for then the words of a turn travel during others.

  Args:
    fn: any function of arrays that is differentiated once, in reverse. Keyword
      arguments are passed on and not differentiated.
    codec: what residuals are kept as. A codec: dense and sparse floats of 2048
      values or more are encoded by it, where that is smaller (`zero_value`:
      sparse ones alone; exact, since a residual without room is computed
      again). `offload(codec)`: they go to the host. `recompute()`: computed
      again. Pairs of a regular expression and one of these: the first that is
      found in a residual's name; see `residuals_of`. A function of a
      `Residual` that returns one of these. None: as they are, booleans as bits.
    params: positions of arguments that are there anyway, such as parameters:
      they are not kept. So is what `fn` closes over.
    recompute: "cheap", or "all": what weighs least is kept of what all else can
      be computed from, mostly the arguments, as `jax.checkpoint` does.
    count_overflows: whether to return `(result, overflows)`, overflows being
      how many residuals in zero-value coding had no room, int32[]; 0 where
      nothing is differentiated.

  Returns:
    A function with the arguments of `fn`. Forward-mode differentiation of it
    is a TypeError of JAX, second derivatives a NotImplementedError.

  Raises:
    TypeError: `codec` is none of these, or not for an array it was chosen for.
    ValueError: `fn` has side effects, `params` are no positions, a rule matches
      no residual, or a codec remembers something between arrays.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion import codecs
    >>> def loss(w, x):
    ...   return jnp.sum(jnp.tanh(x @ w) ** 2)
    >>> w, x = jnp.eye(64), jnp.ones((64, 64))
    >>> packed = compress_residuals(loss, codecs.uniform(bits=8))
    >>> exact, near = jax.grad(loss)(w, x), jax.grad(packed)(w, x)
    >>> bool(packed(w, x) == loss(w, x)), bool(jnp.allclose(exact, near, 0.02))
    (True, True)

  References:
    Jin et al., *Layrub: layer-centric GPU memory reuse and data migration in
    extreme-scale deep learning systems*, 2018. Rhu et al., *Compressing DMA
    Engine*, 2018. Jain et al., *Gist: efficient data encoding for deep neural
    network training*, 2018. Chen et al., *ActNN*, 2021.
  """
  choose = make_choice(codec)
  check_choice("recompute", recompute, ("cheap", "all"))

  @functools.wraps(fn)
  def wrapped(*args: PyTree, **kwargs: Any) -> PyTree:
    bound = functools.partial(fn, **kwargs)
    traced = TracedFunction(bound, args, params, Options(choose, recompute))
    _check_rules(codec, traced)
    result, notes = traced()
    return (result, notes.overflows) if count_overflows else result

  return wrapped


def residuals_of(
  fn: Callable[..., PyTree],
  *args: PyTree,
  codec: Action | ResidualRules | ResidualChoice = None,
  params: int | Sequence[int] = 0,
  recompute: str = "cheap",
) -> list[Residual]:
  """Lists what a function keeps for its backward pass.

  Nothing is computed: arguments may be shapes.

  Args:
    fn: as for `compress_residuals`.
    *args: its arguments.
    codec: as for `compress_residuals`.
    params: as for `compress_residuals`.
    recompute: as for `compress_residuals`.

  Returns:
    A `Residual` for each array: its name, what it weighs (`nbytes`), what is
    kept of it weighs (`encoded_bytes`) and how often there is one (`repeats`).
    A name is "kind/label". Kinds are "mask" (booleans), "integer", "sparse"
    (floats that a rectifier made, or what keeps its zeros), "dense" and
    "other". Labels are those of `checkpoint_name`, paths of arguments, or the
    primitive and its number; in loops they start with "scan_0/".

  Example:
    >>> import jax.numpy as jnp
    >>> def loss(w, x):
    ...   return jnp.sum(jax.nn.relu(x @ w[0]) @ w[1])
    >>> w, x = jnp.ones((2, 64, 64)), jnp.ones((32, 64))
    >>> [(r.name, r.encoded_bytes) for r in residuals_of(loss, w, x)]
    [('dense/1', 8192), ('sparse/custom_jvp_call_0', 8192)]
  """
  found: list[Residual] = []

  def trace(*args: PyTree) -> None:
    traced = TracedFunction(
      fn, args, params, Options(make_choice(codec), recompute)
    )
    found.extend(traced.residuals())

  jax.eval_shape(trace, *args)
  return found


def _check_rules(codec: Any, traced: TracedFunction) -> None:
  if not isinstance(codec, list | tuple):
    return
  kept = [r.name for r in traced.residuals()]
  again = traced.computed_again()
  for pattern, _ in codec:
    if not any(re.search(pattern, name) for name in kept + again):
      listed = ", ".join(map(repr, kept))
      raise ValueError(
        f"`codec` must have rules that match a residual each, got {pattern!r}, "
        f"which matches none of {listed or 'no residuals'}."
      )
