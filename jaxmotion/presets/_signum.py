"""Preset `signum`: signs of momenta, by majority vote."""

import optax

from jaxmotion import core, transforms
from jaxmotion.core import AxisName
from jaxmotion.presets import _lion, _shared


def signum(
  axis_name: AxisName,
  learning_rate: optax.ScalarOrSchedule,
  *,
  momentum: float = 0.9,
  weight_decay: float = 0.0,
  one_bit: bool = False,
  nonfinite: str = "skip",
) -> optax.GradientTransformationExtraArgs:
  """Makes SGD by the sign that most workers' momenta have (Signum).

  Each worker adds up a momentum of its own gradients and sends its signs, in
  1.6 bits per element. Parameters move by the sign that most workers have. It
  is a whole optimizer, with the exchange inside. With `momentum=0.0` it is
  signSGD with majority vote.

  Ours differs from the paper thus: a zero abstains, and a tie is zero. The
  paper sends 1 bit, in which zeros count as positive (`one_bit=True`).

  Args:
    axis_name: the workers' axis. With `HostAxes` the devices of a host have one
      vote, on the mean of their momenta.
    learning_rate: number or schedule.
    momentum: factor on the momentum, in [0, 1).
    weight_decay: decoupled, in units of the learning rate.
    one_bit: whether zeros, and ties, count as positive.
    nonfinite: "propagate", "skip" or "zero", for gradients.

  Returns:
    A transformation that takes the place of `optax.chain(exchange(...), tx)`.

  Raises:
    TypeError, ValueError: an argument of another type or out of range.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> tx = signum("data", 0.5)
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> from jaxmotion import make_train_step
    >>> init, step = make_train_step(lambda w, x: jnp.mean(x @ w), tx, mesh)
    >>> state = init(jnp.ones((4, 1)))
    >>> state, loss = step(state, jnp.ones((2, 4)))
    >>> state.params.tolist()
    [[0.5], [0.5], [0.5], [0.5]]

  References:
    Bernstein et al., *signSGD with Majority Vote is Communication Efficient and
    Fault Tolerant*, arXiv 1810.05291, 2019, algorithm 1.
  """
  _shared.check_rate("learning_rate", learning_rate)
  _shared.check_rate("weight_decay", weight_decay, schedule=False)
  core.check_number("momentum", momentum, 0, 1, open_high=True)
  tx = optax.chain(
    transforms.per_worker(optax.trace(momentum), axis_name),
    transforms.exchange(axis_name, _lion.make_vote(one_bit)),
    _shared.decay_weights(weight_decay),
    optax.scale_by_learning_rate(learning_rate),
  )
  return _shared.guard_nonfinite(tx, nonfinite, axis_name)
