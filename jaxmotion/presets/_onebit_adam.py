"""Preset `onebit_adam`: Adam whose momenta travel in one bit per element."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmotion import codecs, core, hosts, transforms
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.presets import _shared


class OnebitAdamState(NamedTuple):
  """State of 1-bit Adam.

  Attributes:
    count: int32[], updates so far.
    mu: tree like the parameters, the workers' mean momentum.
    nu: tree like the parameters, of squares; it stays after the warm-up.
    plain: state of the exchange of gradients.
    coded: state of the exchange of momenta.
  """

  count: Array  # type: ignore[assignment]
  mu: PyTree
  nu: PyTree
  plain: transforms.ExchangeState
  coded: transforms.ExchangeState


def onebit_adam(
  axis_name: AxisName,
  learning_rate: optax.ScalarOrSchedule,
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: float = 0.0,
  freeze: int = 1000,
  codec: codecs.Codec | None = None,
  nonfinite: str = "skip",
  as_coded: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Makes Adam whose momenta travel as signs with error memory (1-bit Adam).

  The first `freeze` updates are Adam on gradients at full precision. Then the
  second moments stay as they are. Each worker updates the common momentum by
  its own gradient and sends the result, in 1 bit per element. It is a whole
  optimizer, with the exchange inside.

  Ours differs from the reference thus (`as_coded=True` takes its way). Signs
  have a magnitude for each block of 1024 elements, not for each leaf. Moments
  are corrected for their start, as in Adam. An element whose gradients were
  zero during the warm-up does not move; there, the reference divides by `eps`
  unless it is given a mask. In both, the first gradient counts, which the
  reference drops, and errors are saved with the state, which it forgets. No
  element moves further than Adam ever moves one, (1 - b1) / sqrt(1 - b2) times
  the rate; the reference's may, where the second moment is small.

  Args:
    axis_name: the workers' axis, or `HostAxes`.
    learning_rate: number or schedule.
    b1: factor on the momentum, in [0, 1).
    b2: factor on the mean of squares, in [0, 1).
    eps: added to the root of the mean of squares, greater than 0.
    weight_decay: decoupled, in units of the learning rate.
    freeze: number of updates of Adam; 15 to 25 % of all are usual. At least 1.
    codec: of the momenta; None is `codecs.feedback(codecs.sign())`.
    nonfinite: "propagate", "skip" or "zero", for gradients.
    as_coded: whether to compute what the reference does.

  Returns:
    A transformation that takes the place of `optax.chain(exchange(...), tx)`.

  Raises:
    TypeError, ValueError: an argument of another type or out of range.

  Example:
    >>> tx = onebit_adam("data", 0.5)
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> from jaxmotion import make_train_step
    >>> init, step = make_train_step(lambda w, x: jnp.mean(x @ w), tx, mesh)
    >>> state = init(jnp.ones((4, 1)))
    >>> state, loss = step(state, jnp.ones((2, 4)))
    >>> jnp.round(state.params, 4).tolist()
    [[0.5], [0.5], [0.5], [0.5]]

  References:
    Tang et al., *1-bit Adam: Communication Efficient Large-Scale Training with
    Adam's Convergence Speed*, arXiv 2102.02888, 2021. Code:
    deepspeedai/DeepSpeed, commit edaa722, runtime/fp16/onebit/adam.py.
  """
  _shared.check_rate("learning_rate", learning_rate)
  _shared.check_rate("weight_decay", weight_decay, schedule=False)
  core.check_number("b1", b1, 0, 1, open_high=True)
  core.check_number("b2", b2, 0, 1, open_high=True)
  core.check_number("eps", eps, 0, open_low=True)
  core.check_int("freeze", freeze, 1, 2**31 - 1)
  core.check_bool("as_coded", as_coded)
  if codec is None:
    codec = codecs.feedback(codecs.sign())
    codec = codecs.onebit() if as_coded else codec
  # No update of Adam is greater (Kingma and Ba, 2015, section 2.1). A sign's
  # magnitude may be far beyond what an element's second moment is made for.
  most = max(1.0, (1 - b1) / math.sqrt(1 - b2))
  plain = transforms.exchange(axis_name)
  coded = transforms.exchange(axis_name, codec)

  def init(params: PyTree) -> OnebitAdamState:
    mu, nu = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    count = jnp.zeros((), jnp.int32)
    return OnebitAdamState(
      count, mu, nu, plain.init(params), coded.init(params)
    )

  def update(
    updates: PyTree,
    state: OnebitAdamState,
    params: PyTree | None = None,
    **extra_args: Any,
  ) -> tuple[PyTree, OnebitAdamState]:
    del params
    sending = hosts.check_sending(extra_args.get("sending"))

    def move_mu(updates: PyTree) -> PyTree:
      return jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)

    def warm_up(updates: PyTree) -> OnebitAdamState:
      mean, exchanged = plain.update(updates, state.plain, **extra_args)
      nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, mean)
      return state._replace(mu=move_mu(mean), nu=nu, plain=exchanged)

    def compress(updates: PyTree) -> OnebitAdamState:
      mu, exchanged = coded.update(move_mu(updates), state.coded, **extra_args)
      return state._replace(mu=mu, coded=exchanged)

    # The branch is around the collectives. The count is equal on all workers.
    state = lax.cond(
      sending.order_branch(state.count) < freeze, warm_up, compress, updates
    )
    count = optax.safe_increment(state.count)
    # With a frozen second moment, the correction of it stays.
    squares = jnp.minimum(count, freeze)

    def scale(m: Array, v: Array) -> Array:
      if as_coded:
        return m / (jnp.sqrt(v) + eps)
      root = jnp.sqrt(v / (1 - b2**squares)) + eps
      y = jnp.where(v > 0, m / (1 - b1**count) / root, 0.0)
      return jnp.clip(y, -most, most)

    direction = jax.tree.map(scale, state.mu, state.nu)
    return direction, state._replace(count=count)

  tx = optax.chain(
    optax.GradientTransformationExtraArgs(init, update),
    _shared.decay_weights(weight_decay),
    optax.scale_by_learning_rate(learning_rate),
  )
  return _shared.guard_nonfinite(tx, nonfinite, axis_name)
