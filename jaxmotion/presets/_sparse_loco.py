"""Preset `sparse_loco`: outer steps by few elements of two bits."""

import optax

from jaxmotion import codecs, core, transforms
from jaxmotion.core import AxisName
from jaxmotion.presets import _shared


def sparse_loco(
  axis_name: AxisName,
  learning_rate: optax.ScalarOrSchedule = 1.0,
  *,
  decay: float = 0.95,
  count: int = 64,
  chunk: int = 64,
  bits: int | None = 2,
  span: float = 6.0,
  use_dct: bool = False,
  weight_decay: float = 0.0,
  nonfinite: str = "skip",
  as_coded: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Makes the outer optimizer of SparseLoCo, with its exchange inside.

  Its updates are pseudo-gradients: what a worker's parameters have moved, with
  the sign of a gradient, over some steps of its own. Of each 64 x 64 tile 64
  elements are sent, in 2 bits, and averaged over the workers that sent them.
  What is not sent decays by 0.95 and takes the place of an outer momentum.
  Taken with gradients of every step, it is an SGD with the same exchange.

  Ours differs from the reference thus (`as_coded=True` takes its way). The
  learning rate scales the outer step alone, not also what enters the memory, so
  that it does not count twice. A tile is a tile: without a transform, the
  reference selects in whole rows of a matrix. Where `chunk` does not divide a
  dimension, tiles are filled up with zeros, instead of cut to the greatest
  divisor. Codes and places are packed.

  Args:
    axis_name: the workers' axis, or `HostAxes`.
    learning_rate: of the outer step, a number or a schedule.
    decay: factor on what is not sent yet, in (0, 1].
    count: elements of a tile that are sent.
    chunk: greatest length of a side of a tile, 1 to 256.
    bits: width of an element, 2 to 8; None sends float32.
    span: width of all quantization bins, in standard deviations.
    use_dct: whether tiles are transformed by cosines first.
    weight_decay: decoupled, in units of the learning rate.
    nonfinite: "propagate", "skip" or "zero", for pseudo-gradients.
    as_coded: whether to compute what the reference does.

  Returns:
    A transformation that takes the place of `optax.chain(exchange(...), tx)`.

  Raises:
    TypeError, ValueError: an argument of another type or out of range.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> tx = sparse_loco("data", 0.5)
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> from jaxmotion import make_train_step
    >>> init, step = make_train_step(lambda w, x: jnp.mean(x @ w), tx, mesh)
    >>> state = init(jnp.ones((4, 1)))
    >>> state, loss = step(state, jnp.ones((2, 4)))
    >>> state.params.tolist()
    [[0.5], [0.5], [0.5], [0.5]]

  References:
    Sarfi et al., *Communication Efficient LLM Pre-training with SparseLoCo*,
    arXiv 2508.15706, 2025. Code: tplr-ai/CCLoco, commit c01a785; the tiles are
    those of tplr-ai/templar, commit c2397ac.
  """
  _shared.check_rate("learning_rate", learning_rate)
  _shared.check_rate("weight_decay", weight_decay, schedule=False)
  core.check_bool("use_dct", use_dct)
  core.check_bool("as_coded", as_coded)
  fit = "divide" if as_coded else "pad"
  head: codecs.Codec = codecs.dct(chunk=chunk, fit=fit)
  if not use_dct:
    shape = "row" if as_coded else "square"
    head = codecs.tiles(chunk=chunk, fit=fit, shape=shape)
  selected: codecs.Codec = codecs.topk_columns(count=count)
  if bits is not None:
    selected = codecs.chain(selected, codecs.codebook(bits=bits, span=span))
  codec = codecs.feedback(
    codecs.chain(head, codecs.contributors(selected)), decay=decay
  )
  tx = optax.chain(
    _shared.scale_by_rate(learning_rate) if as_coded else optax.identity(),
    # The mean over senders is of all elements of all workers.
    transforms.exchange(axis_name, codec, method="gather"),
    _shared.decay_weights(weight_decay),
    optax.scale_by_learning_rate(learning_rate),
  )
  return _shared.guard_nonfinite(tx, nonfinite, axis_name)
