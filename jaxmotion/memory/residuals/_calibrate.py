"""Calibration of zero-value coding: capacities from measured nonzeros."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import jax

from jaxmotion import codecs, core
from jaxmotion.core import Array, PyTree
from jaxmotion.memory.residuals import _traced, choose


def calibrate_zero_value(
  fn: Callable[..., PyTree],
  batches: Iterable[Sequence[PyTree]],
  *,
  params: int | Sequence[int] = 0,
  headroom: float = 0.05,
) -> tuple[tuple[str, choose.Action], ...]:
  """Measures the nonzeros of sparse residuals and sets a capacity for each.

  The capacity is (1 + headroom) times the largest share of nonzeros of any
  tile of 1024 elements in any batch. A residual whose capacity would reach 1
  gets no rule: zero-value coding would not make it smaller.

  Args:
    fn: function of arrays, as `compress_residuals` takes.
    batches: tuples of arguments, one for each run of the function.
    params: positions of the arguments that are always live; see
      `compress_residuals`.
    headroom: relative capacity beyond the largest measured share, >= 0.

  Returns:
    Pairs of a pattern and a codec, the `codec` of `compress_residuals`. Append
    rules for other residuals.

  Raises:
    TypeError: `fn` is no function, `params` are no positions, `headroom` is no
      number, or a batch is no tuple of arguments.
    ValueError: there are no batches, or `headroom` is negative.

  Example:
    >>> import jax.numpy as jnp
    >>> def loss(w, x):
    ...   y = jax.nn.relu(x @ w[0])
    ...   return jnp.sum((y @ w[1]) ** 2)
    >>> w = jnp.stack([-jnp.eye(64), jnp.ones((64, 64))])
    >>> x = jnp.arange(-64.0, 4032).reshape(64, 64)
    >>> rules = calibrate_zero_value(loss, [(w, x)])
    >>> [codec.capacity for _, codec in rules]
    [0.065625]

  References:
    Rhu et al., *Compressing DMA Engine: Leveraging Activation Sparsity for
    Training Deep Neural Networks*, 2018.
  """
  core.check_callable("fn", fn)
  _traced.check_params(params)
  core.check_number("headroom", headroom, 0)
  options = choose.make_options(None, None, None)._replace(measure=True)

  @jax.jit
  def measure(*args: PyTree) -> dict[str, Array]:
    traced = _traced.TracedFunction(fn, args, params, options)
    (_, notes), _ = traced.run_forward()
    return notes.fills

  share: dict[str, float] = {}
  if not isinstance(batches, Iterable) or isinstance(batches, jax.core.Tracer):
    raise TypeError(
      f"`batches` must be an iterable of tuples of arguments, got {batches!r}."
    )
  for args in batches:
    core.check_sequence("batches", args, "arguments, for each run of `fn`")
    core.check_arrays("batches", args)
    for name, fill in jax.device_get(measure(*args)).items():
      share[name] = max(share.get(name, 0.0), float(fill))
  if not share:
    raise ValueError(
      "`batches` must hold arguments of a function that saves arrays with "
      "zeros for its backward pass, got none."
    )
  capacity = {name: (1 + headroom) * fill for name, fill in share.items()}
  return tuple(
    (f"^{re.escape(name)}$", codecs.zero_value(capacity=max(least, 1e-6)))
    for name, least in capacity.items()
    if least < 1
  )
