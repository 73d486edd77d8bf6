"""Preset `ef21_sgdm`: differences of momenta, a hundredth of their elements."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmotion import codecs, core, transforms
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.presets import _shared


class AverageState(NamedTuple):
  """State of the average of one worker's gradients.

  Attributes:
    count: int32[], gradients so far.
    average: tree like the parameters.
  """

  count: Array  # type: ignore[assignment]
  average: PyTree


def ef21_sgdm(
  axis_name: AxisName,
  *,
  codec: codecs.Codec | None = None,
  momentum: float = 0.9,
  start: int = 1,
  min_size: int = 1024,
  min_dimensions: int = 2,
  nonfinite: str = "skip",
) -> optax.GradientTransformationExtraArgs:
  """Makes `exchange` of differences of momenta (EF21-SGDM).

  Each worker averages its gradients, v = momentum v + (1 - momentum) g. For 1 %
  of the elements, it sends how v differs from what it has sent before. All know
  the mean of what was sent, which is the result. Vectors and leaves of fewer
  than `min_size` elements travel whole. Follow it by an optimizer without
  momentum, such as `optax.sgd(0.1)`. With `momentum=0.0` it is EF21.

  The first `start` updates send all elements: the algorithms begin with the
  whole gradient. Ours differs from the references thus. Elements are selected
  in blocks, not in the whole model, and the memory forgets what is not finite.

  Args:
    axis_name: the workers' axis, or `HostAxes`.
    codec: of the differences; None is `codecs.topk(density=0.01)`.
    momentum: factor on the average, in [0, 1); the paper's 1 - eta.
    start: number of updates that send all elements; 0 begins from zero.
    min_size: least number of elements of a leaf that is not sent whole.
    min_dimensions: least number of dimensions of such a leaf; 0 selects from
      vectors too, such as the parameters of a linear model.
    nonfinite: "propagate", "skip" or "zero", for gradients.

  Returns:
    A transformation that takes the place of `exchange(...)` in a chain.

  Raises:
    TypeError, ValueError: an argument of another type or out of range.

  Example:
    >>> tx = optax.chain(ef21_sgdm("data"), optax.sgd(0.5))
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> from jaxmotion import make_train_step
    >>> init, step = make_train_step(lambda w, x: jnp.mean(x @ w), tx, mesh)
    >>> state = init(jnp.ones((4, 1)))
    >>> state, loss = step(state, jnp.ones((2, 4)))
    >>> state.params.tolist()
    [[0.5], [0.5], [0.5], [0.5]]

  References:
    Richtarik, Sokolov and Fatkhullin, *EF21: A New, Simpler, Theoretically
    Better, and Practically Faster Error Feedback*, arXiv 2106.05203, 2021.
    Fatkhullin, Tyurin and Richtarik, *Momentum Provably Improves Error
    Feedback!*, arXiv 2305.15155, 2023. Code:
    IgorSokoloff/ef21_experiments_source_code, EF21_100K.py.
  """
  core.check_number("momentum", momentum, 0, 1, open_high=True)
  core.check_int("start", start, 0, 2**31 - 1)
  core.check_int("min_size", min_size, 0)
  core.check_int("min_dimensions", min_dimensions, 0, 32)
  later = codecs.topk(density=0.01) if codec is None else codec
  # From the same state, first of whole differences and then of few elements.
  ladder = [
    codecs.where_smaller(
      codecs.ef21(own),
      min_size=min_size,
      min_dimensions=min_dimensions,
      min_ratio=1e-9,
    )
    for own in (later, codecs.identity())
  ]
  tx = optax.chain(
    transforms.per_worker(_average(momentum), axis_name),
    transforms.exchange(
      axis_name,
      ladder if start else ladder[0],
      schedule=((lambda count: (count < start).astype(int)) if start else None),
    ),
  )
  return _shared.guard_nonfinite(tx, nonfinite, axis_name)


def _average(decay: float) -> optax.GradientTransformation:
  """Averages gradients, from the first one on."""

  def init(params: PyTree) -> AverageState:
    zeros = jax.tree.map(jnp.zeros_like, params)
    return AverageState(jnp.zeros((), jnp.int32), zeros)

  def update(
    updates: PyTree, state: AverageState, params: PyTree | None = None
  ) -> tuple[PyTree, AverageState]:
    del params
    old = jnp.where(state.count > 0, decay, 0.0)
    average = jax.tree.map(
      lambda v, g: (old * v + (1 - old) * g).astype(g.dtype),
      state.average,
      updates,
    )
    count = optax.safe_increment(state.count)
    return average, AverageState(count, average)

  return optax.GradientTransformation(init, update)
