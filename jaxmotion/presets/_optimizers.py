"""Presets of optimizers with an exchange inside."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmotion import codecs, core, hosts, transforms
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.presets._exchanges import (
  NOTE_APART,
  guard_nonfinite,
  note_facts,
)

_NOTE_TUNED = "Replaces the optimizer; its learning rate has to be tuned."
_FACTOR = core.number(0, 1, open_high=True)


def _check_rate(name: str, value: Any) -> Any:
  """Returns a number >= 0 or a floating-point scalar, or raises."""
  if not isinstance(value, jax.Array):
    return core.number(0)(name, value)
  core.float_array(name, value)
  if jnp.ndim(value):
    raise ValueError(
      f"`{name}` must be a scalar, got shape {jnp.shape(value)}."
    )
  return value


def _check_rate_or_schedule(name: str, value: Any) -> Any:
  """Returns a rate or a schedule of rates, or raises."""
  is_schedule = callable(value) and not isinstance(value, type)
  return value if is_schedule else _check_rate(name, value)


RATES: dict[str, core.Kind] = {
  "learning_rate": _check_rate_or_schedule,
  "weight_decay": _check_rate,
}


class OnebitAdamState(NamedTuple):
  """State of 1-bit Adam, with trees like the parameters."""

  count: Array  # type: ignore[assignment]  # int32[], updates so far.
  mu: PyTree  # The workers' mean momentum.
  nu: PyTree  # Mean of squares, which stays after the warm-up.
  plain: transforms.ExchangeState  # Of the exchange of gradients.
  coded: transforms.ExchangeState  # Of the exchange of momenta.


@note_facts(
  "Replaces the optimizer by Adam, whose second moments freeze.",
  no_lookups="It assumes that every element has a gradient before its second "
  "moments freeze",
)
@core.declare(
  b1=_FACTOR,
  b2=_FACTOR,
  eps=core.number(0, open_low=True),
  freeze=core.integer(1, 2**31 - 1),
  **RATES,
)
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
) -> optax.GradientTransformationExtraArgs:
  """Makes Adam whose momenta travel as signs with error memory (1-bit Adam).

  The first `freeze` updates are Adam on gradients at full precision. Then the
  second moments stay as they are. Each worker updates the common momentum by
  its own gradient and sends the result, in 1 bit per element.

  Ours differs from the reference thus. Signs have a magnitude for each block of
  1024 elements; with `codec=codecs.onebit()` for each leaf, as there. Moments
  are corrected for their start, as in Adam. An element whose gradients were
  zero during the warm-up does not move; there, the reference divides by `eps`
  unless it is given a mask. The first gradient counts, which the reference
  drops, and errors are saved with the state, which it forgets. No element moves
  further than Adam ever moves one, (1 - b1) / sqrt(1 - b2) times the rate; the
  reference's may, where the second moment is small.

  Args:
    b1: factor on the momentum, in [0, 1).
    b2: factor on the mean of squares, in [0, 1).
    eps: added to the root of the mean of squares, greater than 0.
    freeze: number of updates of Adam; 15 to 25 % of all are usual. At least 1.
    codec: of the momenta; None is `codecs.feedback(codecs.sign())`.
    others: see `jaxmotion.presets`.

  Example:
    >>> tx = onebit_adam("data", 1e-3, freeze=1000)

  References:
    Tang et al., *1-bit Adam: Communication Efficient Large-Scale Training with
    Adam's Convergence Speed*, arXiv 2102.02888, 2021. Code:
    deepspeedai/DeepSpeed, commit edaa722, runtime/fp16/onebit/adam.py.
  """
  codec = codecs.feedback(codecs.sign()) if codec is None else codec
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
    """Returns Adam's direction, by the mean gradient or by coded momenta."""
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
      root = jnp.sqrt(v / (1 - b2**squares)) + eps
      y = jnp.where(v > 0, m / (1 - b1**count) / root, 0.0)
      return jnp.clip(y, -most, most)

    direction = jax.tree.map(scale, state.mu, state.nu)
    return direction, state._replace(count=count)

  parts = [optax.GradientTransformationExtraArgs(init, update)]
  return _chain_parts(parts, axis_name, learning_rate, weight_decay, nonfinite)


@note_facts(_NOTE_TUNED)
@core.declare(**RATES)
def demo(
  axis_name: AxisName,
  learning_rate: optax.ScalarOrSchedule,
  *,
  decay: float = 0.999,
  count: int = 32,
  chunk: int = 64,
  weight_decay: float = 0.0,
  nonfinite: str = "skip",
) -> optax.GradientTransformationExtraArgs:
  """Makes an optimizer that shares a few coefficients of its momentum (DeMo).

  Each worker has a momentum of its own. Of each 64 x 64 tile it sends the 32
  greatest cosine coefficients, and takes them out of the momentum. Each
  coefficient is averaged over the workers that sent it; the parameters move by
  the sign of what all received.

  Ours differs from the reference thus. Where 64 does not divide a dimension,
  tiles are filled up with zeros. The reference takes the greatest divisor, 1
  for a prime number, which sends every element. Arrays of more than two
  dimensions are matrices of their last one; the reference takes none. A
  worker's non-finite momentum is forgotten, where the reference stops to train
  the tile without notice. Places travel in 16 bits, not in 64.

  Args:
    learning_rate: number or schedule. It scales gradients as they enter the
      momentum, and the signs.
    decay: factor on the momentum in each step, in (0, 1].
    others: see `jaxmotion.presets`.

  Example:
    >>> tx = demo("data", 1e-3, weight_decay=0.1)

  References:
    Peng, Quesnelle and Kingma, *DeMo: Decoupled Momentum Optimization*, arXiv
    2411.19870, 2024. Code: bloc97/DeMo, commit 0e48145.
  """
  greatest = codecs.contributors(codecs.topk_columns(count=count))
  codec = codecs.chain(codecs.dct(chunk=chunk), greatest)
  parts = [
    optax.scale_by_learning_rate(learning_rate, flip_sign=False),
    # The mean over senders is of all coefficients of all workers.
    transforms.exchange(
      axis_name, codecs.feedback(codec, decay=decay), method="gather"
    ),
    optax.stateless(lambda updates, params: jax.tree.map(jnp.sign, updates)),
  ]
  return _chain_parts(parts, axis_name, learning_rate, weight_decay, nonfinite)


@note_facts(_NOTE_TUNED)
@core.declare(b1=_FACTOR, b2=_FACTOR, one_bit=core.boolean, **RATES)
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
  Parameters move by the sign that most workers have. With one worker it is
  `optax.lion`.

  Ours differs from the paper thus. An element that is zero abstains, as the
  sign of zero is zero in Lion, and a tie of two halves is zero. The paper sends
  1 bit, by which a parameter without a gradient moves at every step
  (`one_bit=True`).

  Args:
    b1: factor on the momentum in the update, in [0, 1).
    b2: factor on the momentum in the next momentum, in [0, 1).
    others: see `jaxmotion.presets`.

  Example:
    >>> tx = lion("data", 1e-4, weight_decay=0.1)

  References:
    Chen et al., *Symbolic Discovery of Optimization Algorithms*, arXiv
    2302.06675, 2023. Liu et al., *Communication Efficient Distributed Training
    with Distributed Lion*, arXiv 2404.00438, 2024 (the majority vote).
  """
  parts = [
    transforms.per_worker(_interpolate(b1, b2), axis_name),
    transforms.exchange(axis_name, _make_vote(one_bit)),
  ]
  return _chain_parts(parts, axis_name, learning_rate, weight_decay, nonfinite)


def _make_vote(one_bit: bool) -> codecs.vote:
  """Returns the codec of a vote, in which zeros abstain or are positive."""
  return codecs.vote(codecs.sign()) if one_bit else codecs.vote()


def _interpolate(b1: float, b2: float) -> optax.GradientTransformation:
  """Makes Lion's mix of gradient and momentum, whose sign is its update."""

  def update(
    updates: PyTree, mu: PyTree, params: PyTree | None = None
  ) -> tuple[PyTree, PyTree]:
    """Returns Lion's direction, whose sign is voted on, and its momentum."""

    def mix(b: float) -> PyTree:
      return jax.tree.map(lambda m, g: b * m + (1 - b) * g, mu, updates)

    return mix(b1), mix(b2)

  return optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params), update
  )


@note_facts(_NOTE_TUNED)
@core.declare(momentum=_FACTOR, one_bit=core.boolean, **RATES)
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
  1.6 bits per element. Parameters move by the sign that most workers have. With
  `momentum=0.0` it is signSGD with majority vote.

  Ours differs from the paper thus: a zero abstains, and a tie is zero. The
  paper sends 1 bit, in which zeros count as positive (`one_bit=True`).

  Args:
    others: see `jaxmotion.presets`.

  Example:
    >>> tx = signum("data", 1e-4, weight_decay=0.1)

  References:
    Bernstein et al., *signSGD with Majority Vote is Communication Efficient and
    Fault Tolerant*, arXiv 1810.05291, 2019, algorithm 1.
  """
  parts = [
    transforms.per_worker(optax.trace(momentum), axis_name),
    transforms.exchange(axis_name, _make_vote(one_bit)),
  ]
  return _chain_parts(parts, axis_name, learning_rate, weight_decay, nonfinite)


@note_facts(NOTE_APART, is_outer=True)
@core.declare(**RATES)
def sparse_loco(
  axis_name: AxisName,
  learning_rate: optax.ScalarOrSchedule = 1.0,
  *,
  decay: float = 0.95,
  count: int = 64,
  chunk: int = 64,
  bits: int | None = 2,
  span: float = 6.0,
  weight_decay: float = 0.0,
  nonfinite: str = "skip",
) -> optax.GradientTransformationExtraArgs:
  """Makes the outer optimizer of SparseLoCo, with its exchange inside.

  Its updates are pseudo-gradients: what a worker's parameters have moved, with
  the sign of a gradient, over some steps of its own. Of each 64 x 64 tile 64
  elements are sent, in 2 bits, and averaged over the workers that sent them.
  What is not sent decays by 0.95 and takes the place of an outer momentum.
  Taken with gradients of every step, it is an SGD with the same exchange.

  Ours differs from the reference thus. The learning rate scales the outer step
  alone, not also what enters the memory, so that it does not count twice. A
  tile is a tile: without a cosine transform, the reference selects in whole
  rows of a matrix. Where `chunk` does not divide a dimension, tiles are filled
  up with zeros, instead of cut to the greatest divisor. Codes and places are
  packed.

  Args:
    learning_rate: of the outer step, a number or a schedule.
    decay: factor on what is not sent yet, in (0, 1].
    bits: width of an element, 2 to 8; None sends float32.
    span: width of all quantization bins, in standard deviations.
    others: see `jaxmotion.presets`.

  Example:
    >>> outer = sparse_loco("data", 1.0)
    >>> scheme = transforms.local_updates(optax.adamw(4e-4), outer, every=30)

  References:
    Sarfi et al., *Communication Efficient LLM Pre-training with SparseLoCo*,
    arXiv 2508.15706, 2025. Code: tplr-ai/CCLoco, commit c01a785; the tiles are
    those of tplr-ai/templar, commit c2397ac.
  """
  selected: codecs.Codec = codecs.topk_columns(count=count)
  if bits is not None:
    selected = codecs.chain(selected, codecs.codebook(bits=bits, span=span))
  codec = codecs.chain(codecs.tiles(chunk=chunk), codecs.contributors(selected))
  parts = [
    # The mean over senders is of all elements of all workers.
    transforms.exchange(
      axis_name, codecs.feedback(codec, decay=decay), method="gather"
    ),
  ]
  return _chain_parts(parts, axis_name, learning_rate, weight_decay, nonfinite)


def _chain_parts(
  parts: Sequence[optax.GradientTransformation],
  axis_name: AxisName,
  learning_rate: optax.ScalarOrSchedule,
  weight_decay: float | Array,
  nonfinite: str,
) -> optax.GradientTransformationExtraArgs:
  """Chains an optimizer's parts, weight decay, rate and non-finite policy."""
  # Decayed weights need parameters, which a decay of zero does not ask for.
  decays = not isinstance(weight_decay, int | float) or weight_decay
  tx = optax.chain(
    *parts,
    optax.add_decayed_weights(weight_decay) if decays else optax.identity(),
    optax.scale_by_learning_rate(learning_rate),
  )
  return guard_nonfinite(tx, nonfinite, axis_name)
