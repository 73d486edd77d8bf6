"""Preset `lion`: the optimizer Lion, with a vote on its signs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmotion import codecs, core, transforms
from jaxmotion.core import AxisName, PyTree
from jaxmotion.presets import _shared


class LionState(NamedTuple):
  """State of Lion on one worker.

  Attributes:
    mu: tree like the parameters, the momentum.
  """

  mu: PyTree


def lion(
  axis_name: AxisName,
  learning_rate: optax.ScalarOrSchedule,
  *,
  b1: float = 0.9,
  b2: float = 0.99,
  weight_decay: float = 0.001,
  one_bit: bool = False,
  nonfinite: str = "skip",
) -> optax.GradientTransformationExtraArgs:
  """Makes Lion of workers that vote on the sign of each update.

  Each worker has a momentum of its own and sends 1.6 bits per element. These
  are the sign of b1 times the momentum plus (1 - b1) times the gradient.
  Parameters move by the sign that most workers have. It is a whole optimizer,
  with the exchange inside. With one worker it is `optax.lion`.

  Ours differs from the paper thus. An element that is zero abstains, as the
  sign of zero is zero in Lion, and a tie of two halves is zero. The paper sends
  1 bit, by which a parameter without a gradient moves at every step
  (`one_bit=True`).

  Args:
    axis_name: the workers' axis. With `HostAxes` the devices of a host have one
      vote, on the mean of their updates.
    learning_rate: number or schedule.
    b1: factor on the momentum in the update, in [0, 1).
    b2: factor on the momentum in the next momentum, in [0, 1).
    weight_decay: decoupled, in units of the learning rate.
    one_bit: whether zeros, and ties, count as positive.
    nonfinite: "propagate", "skip" or "zero", for gradients.

  Returns:
    A transformation that takes the place of `optax.chain(exchange(...), tx)`.

  Raises:
    TypeError, ValueError: an argument of another type or out of range.

  Example:
    >>> tx = lion("data", 0.5, weight_decay=0.0)
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> from jaxmotion import make_train_step
    >>> init, step = make_train_step(lambda w, x: jnp.mean(x @ w), tx, mesh)
    >>> state = init(jnp.ones((4, 1)))
    >>> state, loss = step(state, jnp.ones((2, 4)))
    >>> state.params.tolist()
    [[0.5], [0.5], [0.5], [0.5]]

  References:
    Chen et al., *Symbolic Discovery of Optimization Algorithms*, arXiv
    2302.06675, 2023. Liu et al., *Communication Efficient Distributed Training
    with Distributed Lion*, arXiv 2404.00438, 2024 (the majority vote).
  """
  _shared.check_rate("learning_rate", learning_rate)
  _shared.check_rate("weight_decay", weight_decay, schedule=False)
  core.check_number("b1", b1, 0, 1, open_high=True)
  core.check_number("b2", b2, 0, 1, open_high=True)
  tx = optax.chain(
    transforms.per_worker(_interpolate(b1, b2), axis_name),
    transforms.exchange(axis_name, make_vote(one_bit)),
    _shared.decay_weights(weight_decay),
    optax.scale_by_learning_rate(learning_rate),
  )
  return _shared.guard_nonfinite(tx, nonfinite, axis_name)


def make_vote(one_bit: bool) -> codecs.vote:
  """Returns the codec of a vote, in which zeros abstain or are positive."""
  core.check_bool("one_bit", one_bit)
  return codecs.vote(codecs.sign()) if one_bit else codecs.vote()


def _interpolate(b1: float, b2: float) -> optax.GradientTransformation:
  def init(params: PyTree) -> LionState:
    return LionState(jax.tree.map(jnp.zeros_like, params))

  def update(
    updates: PyTree, state: LionState, params: PyTree | None = None
  ) -> tuple[PyTree, LionState]:
    del params

    def mix(b: float) -> PyTree:
      return jax.tree.map(lambda m, g: b * m + (1 - b) * g, state.mu, updates)

    return mix(b1), LionState(mix(b2))

  return optax.GradientTransformation(init, update)
