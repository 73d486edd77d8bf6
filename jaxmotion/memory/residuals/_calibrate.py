"""How much room sparse residuals need."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import jax

from jaxmotion.codecs import zero_value
from jaxmotion.core import Array, PyTree
from jaxmotion.memory.residuals._traced import TracedFunction
from jaxmotion.memory.residuals.choose import Action, Options, make_choice


def calibrate_zero_value(
  fn: Callable[..., PyTree],
  batches: Iterable[Sequence[PyTree]],
  *,
  params: int | Sequence[int] = 0,
  slack: float = 0.05,
) -> tuple[tuple[str, Action], ...]:
  """Measures how full sparse residuals are and gives each a zero-value codec.

  capacity = min(1, (1 + slack) share), share being the largest, over batches
  and tiles, of a tile's values that are not zero. What no capacity below 1
  would hold gets no codec.

  Args:
    fn: the function, as for `compress_residuals`.
    batches: its arguments, as tuples, one for each time it is run.
    params: as for `compress_residuals`.
    slack: room beyond what was measured, relative, >= 0.

  Returns:
    Pairs of a pattern and a codec: `codec` of `compress_residuals`, to be
    followed by other rules for other residuals.

  Raises:
    ValueError: there are no batches, or `slack` is negative.

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
  if not slack >= 0:
    raise ValueError(f"`slack` must be >= 0, got {slack!r}.")
  options = Options(make_choice(None), "cheap", measure=True)

  @jax.jit
  def measure(*args: PyTree) -> dict[str, Array]:
    traced = TracedFunction(fn, args, params, options)
    (_, notes), _ = traced.forward()
    return notes.fills

  share: dict[str, float] = {}
  for args in batches:
    for name, fill in jax.device_get(measure(*args)).items():
      share[name] = max(share.get(name, 0.0), float(fill))
  if not share:
    raise ValueError(
      "`batches` must hold arguments of a function that keeps arrays with "
      "zeros for its backward pass, got none."
    )
  room = {name: (1 + slack) * fill for name, fill in share.items()}
  return tuple(
    (f"^{re.escape(name)}$", zero_value(capacity=max(capacity, 1e-6)))
    for name, capacity in room.items()
    if capacity < 1
  )
