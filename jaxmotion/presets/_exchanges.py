"""Presets of exchanges: a chain continues with an optimizer."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from jaxmotion import codecs, core, transforms
from jaxmotion.collectives.extend import NONFINITE_POLICIES, zero_nonfinite
from jaxmotion.core import Array, AxisName, PyTree

_Preset = TypeVar("_Preset", bound=Callable[..., Any])

NOTE_APART = "Workers train apart for {every} steps: compare the loss."


class Facts(NamedTuple):
  """Facts that the planner must know of a preset, its attribute `facts`."""

  # What it changes about training. `{every}` stands for the steps between two
  # exchanges of a scheme.
  note: str
  # What it assumes, by the planner's name for it. The planner adds what breaks
  # the assumption to these words.
  assumes: Mapping[str, str]
  # Whether it is the outer optimizer of `local_updates`.
  is_outer: bool


def note_facts(
  note: str, *, is_outer: bool = False, **assumes: str
) -> Callable[[_Preset], _Preset]:
  """Makes a decorator that says what the planner must know of a preset."""

  def decorate(preset: _Preset) -> _Preset:
    preset.facts = Facts(note, assumes, is_outer)  # type: ignore[attr-defined]
    return preset

  return decorate


# Densities of the warm-up of `dgc`.
_STAGES = 4
_NEEDS_SGD = note_facts(
  "Has the momentum inside: follow it by SGD without momentum.",
  no_moments="It has the momentum inside and assumes SGD without one after it",
)


@note_facts(
  "Sends factors of rank 4, after 1000 steps at full precision.",
  no_stacks="It assumes that an array is one matrix of low rank",
)
@core.declare(form=core.choice(("local", "global", "alternating")))
def power_sgd(
  axis_name: AxisName,
  *,
  rank: int = 4,
  start: int = 1000,
  min_ratio: float = 1.0,
  form: str = "local",
  view: str = "last",
  nonfinite: str = "propagate",
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Makes `exchange` with factors of rank 4 and error feedback (PowerSGD).

  Each matrix travels as two thin factors, in two sums whatever the workers and
  leaves. Leaves that factors do not make smaller, such as vectors, travel at
  full precision with the second sum. `form="alternating"` sends one of both
  factors in turn: half the bytes, in one sum.

  Ours differs from PyTorch's `powerSGD_hook` thus. Error memory is of the local
  form, which stays bounded and is kept for matrices alone; `form="global"` is
  that of the hook. An array of more dimensions is a matrix of its last
  dimension, as kernels are in JAX; `view="first"` takes the hook's. The hook's
  defaults are rank 1 and `min_ratio=2`. Zero, dependent and non-finite columns
  are replaced, so that one bad gradient does not end in NaN at every later
  step. First factors depend on the seed alone, not on the order of leaves. The
  alternating form is that of epfml/powersgd, with the same differences, and
  with memory for the matrices alone.

  Args:
    rank: of the factors.
    start: number of updates that exchange at full precision first.
    min_ratio: least ratio of compression for which a leaf is compressed.
    form: "local"; "global" for the hook's error memory; or "alternating".
    view: "last" for a matrix of an array's last dimension by all others,
      "first" for one of its first, as PyTorch's kernels are.
    seed: seed of the first factors, in [0, 2^32).
    others: see `jaxmotion.presets`.

  Example:
    >>> tx = optax.chain(power_sgd("data", rank=2), optax.adamw(3e-4))

  References:
    Vogels, Karimireddy and Jaggi, *PowerSGD: Practical Low-Rank Gradient
    Compression for Distributed Optimization*, arXiv 1905.13727, 2019. Code:
    PyTorch 2.13, distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py;
    epfml/powersgd, commit f07be92 (the alternating form).
  """
  factors = codecs.low_rank(rank=rank, seed=seed, view=view)
  codec: codecs.Codec | list[codecs.Codec]
  schedule = None
  if form == "alternating":
    # Half of what the payload has room for is sent in a step.
    codec = [
      codecs.where_smaller(
        codecs.feedback(dataclasses.replace(factors, sends=side)),
        min_ratio=min_ratio / 2,
        min_dimensions=2,
      )
      for side in ("right", "left")
    ]
    schedule = lambda count: (count - start) % 2
  elif form == "local":
    remembered = codecs.feedback(factors)
    codec = codecs.where_smaller(remembered, min_ratio=min_ratio)
  else:
    # As in the hook, leaves that are not compressed have a memory too.
    chosen = codecs.where_smaller(factors, min_ratio=min_ratio)
    codec = codecs.feedback(chosen, form="global")
  return transforms.exchange(
    axis_name,
    codec,
    nonfinite=nonfinite,
    seed=seed,
    start=start,
    schedule=schedule,
  )


@_NEEDS_SGD
@core.declare(
  density=core.number(0, 1, open_low=True),
  momentum=core.number(0, 1, open_high=True),
  clip_norm=core.optional(core.number(0, open_low=True)),
  warmup=core.integer(0, 2**31 - 1),
)
def dgc(
  axis_name: AxisName,
  *,
  density: float = 0.001,
  momentum: float = 0.9,
  nesterov: bool = False,
  clip_norm: float | None = 1.0,
  warmup: int = 1000,
  min_size: int = 1024,
  nonfinite: str = "skip",
) -> optax.GradientTransformationExtraArgs:
  """Makes `exchange` with momentum and few elements (DGC).

  Each worker adds its momentum up and sends the greatest elements of the sum;
  they start from zero again, and so does their momentum. Vectors and leaves of
  fewer than `min_size` elements travel whole. Follow it by an optimizer without
  momentum, such as `optax.sgd(0.1)`: the momentum is here.

  During the first `warmup` updates more is sent, in 4 stages of equal length,
  each with the same factor less: early gradients change fast. Gradients are
  clipped on each worker, to `clip_norm` / sqrt(workers), before they enter the
  memory. Without both, training may diverge.

  Ours differs from the reference thus. The greatest element of each block of
  about 1 / density is sent. The reference takes those beyond a threshold that a
  sample determines. It leaves out more of them at the end of an array. The
  momentum of what travels whole is kept before the exchange. Between three
  workers or more, the mean of a large array is selected once more. The
  reference gathers all payloads, whose bytes grow with the workers.

  Args:
    density: share of the elements that is sent, in (0, 1].
    nesterov: whether the gradient is added once more.
    clip_norm: greatest norm of all workers' gradients together, if they are
      independent; None does not clip.
    warmup: number of updates before `density` is reached; 0 for none.
    others: see `jaxmotion.presets`.

  Example:
    >>> tx = optax.chain(dgc("data", clip_norm=None), optax.sgd(0.5))

  References:
    Lin et al., *Deep Gradient Compression: Reducing the Communication Bandwidth
    for Distributed Training*, arXiv 1712.01887, 2018. Code:
    synxlin/deep-gradient-compression, commit 24673d4.
  """
  remember = functools.partial(
    codecs.momentum_correction, decay=momentum, nesterov=nesterov
  )
  # `density` is reached in equal factors, the last of them at `warmup`.
  factor = density ** (1 / (_STAGES + 1))
  stages = [factor ** (stage + 1) for stage in reversed(range(_STAGES))]
  selected = [
    remember(codecs.feedback(codecs.topk(density=own)), masking=True)
    for own in (density, *(stages if warmup else ()))
  ]
  ends = [warmup * (stage + 1) // _STAGES for stage in range(_STAGES)]

  def choose_level(count: Array) -> Array:
    """Returns 0 after the warm-up, and a level of more elements before."""
    return _STAGES - jnp.sum(count >= jnp.asarray(ends, jnp.int32))

  whole = remember(codecs.identity(), masking=False)
  tx = _exchange_large(axis_name, selected, whole, min_size, choose_level)
  if clip_norm is not None:
    tx = optax.chain(_clip_locally(clip_norm, axis_name), tx)
  return guard_nonfinite(tx, nonfinite, axis_name)


@_NEEDS_SGD
@core.declare(
  momentum=core.number(0, 1, open_high=True), start=core.integer(0, 2**31 - 1)
)
def ef21_sgdm(
  axis_name: AxisName,
  *,
  codec: codecs.Codec | None = None,
  momentum: float = 0.9,
  start: int = 1,
  min_size: int = 1024,
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
    codec: of the differences; None is `codecs.topk(density=0.01)`.
    momentum: factor on the average, in [0, 1); the paper's 1 - eta.
    start: number of updates that send all elements; 0 begins from zero.
    others: see `jaxmotion.presets`.

  Example:
    >>> tx = optax.chain(ef21_sgdm("data"), optax.sgd(0.5))

  References:
    Richtarik, Sokolov and Fatkhullin, *EF21: A New, Simpler, Theoretically
    Better, and Practically Faster Error Feedback*, arXiv 2106.05203, 2021.
    Fatkhullin, Tyurin and Richtarik, *Momentum Provably Improves Error
    Feedback!*, arXiv 2305.15155, 2023. Code:
    IgorSokoloff/ef21_experiments_source_code, EF21_100K.py.
  """
  later = codecs.topk(density=0.01) if codec is None else codec
  # From the same state, first of whole differences and then of few elements.
  sent = (later, codecs.identity()) if start else (later,)
  tx = _exchange_large(
    axis_name,
    [codecs.ef21(own) for own in sent],
    codecs.identity(),
    min_size,
    lambda count: (count < start).astype(int),
  )
  tx = optax.chain(transforms.per_worker(_average(momentum), axis_name), tx)
  return guard_nonfinite(tx, nonfinite, axis_name)


@note_facts(
  "Each worker keeps a part of the optimizer's state; gradients and weights "
  "lose accuracy at 4 bits.",
  elementwise="It assumes an optimizer of single elements",
)
def sdp4bit(
  axis_name: AxisName,
  tx: optax.GradientTransformation | optax.MultiSteps,
  *,
  nonfinite: str = "propagate",
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Makes `sharded` with 4-bit gradients and 4-bit differences of weights.

  Gradients travel within a host in 8 bits, blocks of 512, and between hosts
  rotated in blocks of 32, in 4 bits, blocks of 128. The weights' part of each
  worker travels as the difference to what all workers hold, in 4 bits, blocks
  of 2048. Without `HostAxes` gradients take the second step alone.

  Ours differs from the reference thus. Gradients are rounded stochastically
  before they leave a host, so their mean is unbiased without error memory. The
  rotation has random signs. Leaves are encoded one by one, not as one buffer;
  those of fewer than 64 elements per worker are averaged in 4 bits. Levels are
  symmetric and have no room beyond the maximum of a block.

  Args:
    seed: seed of stochastic rounding, in [0, 2^32).
    others: see `jaxmotion.presets`.

  Example:
    >>> tx = sdp4bit("data", optax.adamw(3e-4))

  References:
    Jia et al., *SDP4Bit: Toward 4-bit Communication Quantization in Sharded
    Data Parallelism for LLM Training*, arXiv 2410.15526, 2024. Code:
    jindajia/SDP4Bit, commit ed75187.
  """
  within = codecs.uniform(bits=8, block=512, rounding="stochastic")
  between = codecs.uniform(bits=4, block=128, rounding="stochastic")
  return transforms.sharded(
    axis_name,
    tx,
    gradient_codec=codecs.chain(codecs.rotate(block=32), between),
    weight_codec=codecs.uniform(bits=4, block=2048),
    nonfinite=nonfinite,
    seed=seed,
    local_codec=within if isinstance(axis_name, core.HostAxes) else None,
  )


def guard_nonfinite(
  tx: optax.GradientTransformation, policy: str, axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
  """Applies a policy for non-finite gradients to a whole chain."""
  # A NaN would stay in a momentum that each worker keeps before the exchange.
  core.choice(NONFINITE_POLICIES)("nonfinite", policy)
  if policy == "skip":
    return transforms.skip_nonfinite(tx, axis_name, wait=True)
  if policy == "zero":
    zero = optax.stateless(lambda updates, params: zero_nonfinite(updates))
    tx = optax.chain(zero, tx)
  return optax.with_extra_args_support(tx)


def _exchange_large(
  axis_name: AxisName,
  levels: Sequence[codecs.Codec],
  otherwise: codecs.Codec,
  min_size: int,
  schedule: Callable[[Array], Array],
) -> optax.GradientTransformation:
  """Makes `exchange` with a codec of large matrices for each level."""
  chosen = [
    codecs.where_smaller(
      codec,
      otherwise,
      min_size=min_size,
      min_dimensions=2,
      # The size of a payload must not decide, or states of levels would differ.
      min_ratio=1e-9,
    )
    for codec in levels
  ]
  if len(chosen) == 1:
    return transforms.exchange(axis_name, chosen[0])
  return transforms.exchange(axis_name, chosen, schedule=schedule)


def _clip_locally(
  clip_norm: float, axis_name: AxisName
) -> optax.GradientTransformation:
  """Clips each worker's gradient to the norm `clip_norm` / sqrt(workers)."""
  tiny = 1e-30  # A gradient of zeros is divided by it, and stays zero.

  def clip_gradient(updates: PyTree, params: PyTree) -> PyTree:
    """Returns the gradient of this worker, scaled down if it is too large."""
    leaves = [a for a in jax.tree.leaves(updates) if a.size]
    if not leaves:
      return updates
    count = core.axis_size(axis_name)
    # In units of the greatest element, whose square may leave float32.
    greatest = functools.reduce(
      jnp.maximum, [jnp.abs(a).max().astype(jnp.float32) for a in leaves]
    )
    unit = jnp.maximum(greatest, tiny)
    squares = [jnp.sum((a / unit).astype(jnp.float32) ** 2) for a in leaves]
    norm = jnp.sqrt(sum(squares, jnp.float32(tiny)))
    scale = clip_norm / math.sqrt(count) / unit / norm
    # What is not finite is not clipped; the policy decides about it.
    scale = jnp.where(jnp.isfinite(greatest), jnp.minimum(scale, 1.0), 1.0)
    return jax.tree.map(lambda a: (a * scale).astype(a.dtype), updates)

  return optax.stateless(clip_gradient)


def _average(decay: float) -> optax.GradientTransformation:
  """Makes an exponential average that begins with the first gradient."""

  def init(params: PyTree) -> optax.EmaState:
    zeros = jax.tree.map(jnp.zeros_like, params)
    return optax.EmaState(jnp.zeros((), jnp.int32), zeros)

  def update(
    updates: PyTree, state: optax.EmaState, params: PyTree | None = None
  ) -> tuple[PyTree, optax.EmaState]:
    """Returns the averages, and the state that holds them for the next step."""
    # `optax.ema` would begin with zero, or divide by its weights so far.
    old = jnp.where(state.count > 0, decay, 0.0)
    average = jax.tree.map(
      lambda v, g: (old * v + (1 - old) * g).astype(g.dtype),
      state.ema,
      updates,
    )
    count = optax.safe_increment(state.count)
    return average, optax.EmaState(count, average)

  return optax.GradientTransformation(init, update)
