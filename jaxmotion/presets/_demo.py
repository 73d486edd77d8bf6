"""Preset `demo`: decoupled momentum, few cosine coefficients of each tile."""

import optax

from jaxmotion import codecs, core, transforms
from jaxmotion.core import AxisName
from jaxmotion.presets import _shared


def demo(
  axis_name: AxisName,
  learning_rate: optax.ScalarOrSchedule,
  *,
  decay: float = 0.999,
  count: int = 32,
  chunk: int = 64,
  weight_decay: float = 0.0,
  nonfinite: str = "skip",
  as_coded: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Makes an optimizer that shares a few coefficients of its momentum (DeMo).

  Each worker has a momentum of its own. Of each 64 x 64 tile it sends the 32
  greatest cosine coefficients, and takes them out of the momentum. Each
  coefficient is averaged over the workers that sent it; the parameters move by
  the sign of what all received. It is a whole optimizer, with the exchange
  inside.

  Ours differs from the reference thus. Where 64 does not divide a dimension,
  tiles are filled up with zeros. The reference takes the greatest divisor, 1
  for a prime number, which sends every element (`as_coded=True`). Arrays of
  more than two dimensions are matrices of their last one; the reference takes
  none. A worker's non-finite momentum is forgotten, where the reference stops
  to train the tile without notice. Places travel in 16 bits, not in 64.

  Args:
    axis_name: the workers' axis, or `HostAxes`.
    learning_rate: number or schedule. It scales gradients as they enter the
      momentum, and the signs.
    decay: factor on the momentum in each step, in (0, 1].
    count: coefficients of a tile that are sent.
    chunk: greatest length of a side of a tile, 1 to 256.
    weight_decay: decoupled, in units of the learning rate.
    nonfinite: "propagate", "skip" or "zero", for gradients.
    as_coded: whether tiles are those of the reference.

  Returns:
    A transformation that takes the place of `optax.chain(exchange(...), tx)`.

  Raises:
    TypeError, ValueError: an argument of another type or out of range.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> tx = demo("data", 0.5)
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> from jaxmotion import make_train_step
    >>> init, step = make_train_step(lambda w, x: jnp.mean(x @ w), tx, mesh)
    >>> state = init(jnp.ones((4, 1)))
    >>> state, loss = step(state, jnp.ones((2, 4)))
    >>> state.params.tolist()
    [[0.5], [0.5], [0.5], [0.5]]

  References:
    Peng, Quesnelle and Kingma, *DeMo: Decoupled Momentum Optimization*, arXiv
    2411.19870, 2024. Code: bloc97/DeMo, commit 0e48145.
  """
  _shared.check_rate("learning_rate", learning_rate)
  _shared.check_rate("weight_decay", weight_decay, schedule=False)
  core.check_bool("as_coded", as_coded)
  cosines = codecs.dct(chunk=chunk, fit="divide" if as_coded else "pad")
  greatest = codecs.contributors(codecs.topk_columns(count=count))
  codec = codecs.feedback(codecs.chain(cosines, greatest), decay=decay)
  tx = optax.chain(
    _shared.scale_by_rate(learning_rate),
    # The mean over senders is of all coefficients of all workers.
    transforms.exchange(axis_name, codec, method="gather"),
    _shared.take_signs(),
    _shared.decay_weights(weight_decay),
    optax.scale_by_learning_rate(learning_rate),
  )
  return _shared.guard_nonfinite(tx, nonfinite, axis_name)
