"""Presets of exchanges and of schemes, and parts that presets share."""

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
from jaxmotion.transforms import extend

_TINY = 1e-30
# Densities of the warm-up of `dgc`.
_STAGES = 4
_INT2 = codecs.feedback(codecs.uniform(bits=2))
_INT4 = codecs.feedback(codecs.chain(codecs.rotate(), codecs.uniform(bits=4)))
_APART = "Workers train apart for {every} steps: compare the loss."
_Preset = TypeVar("_Preset", bound=Callable[..., Any])


class Facts(NamedTuple):
  """Facts that the planner must know of a preset, its attribute `facts`.

  Attributes:
    note: what it changes about training; `{every}` stands for the steps between
      two exchanges of a scheme.
    assumes: what it assumes, by the planner's name for it. The planner adds
      what breaks the assumption to these words.
  """

  note: str
  assumes: Mapping[str, str]


def note_facts(note: str, **assumes: str) -> Callable[[_Preset], _Preset]:
  """Makes a decorator that says what the planner must know of a preset."""

  def decorate(preset: _Preset) -> _Preset:
    preset.facts = Facts(note, assumes)  # type: ignore[attr-defined]
    return preset

  return decorate


_NEEDS_SGD = note_facts(
  "Has the momentum inside: follow it by SGD without momentum.",
  no_moments="It has the momentum inside and assumes SGD without one after it",
)


def guard_nonfinite(
  tx: optax.GradientTransformation, policy: str, axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
  """Applies a policy for non-finite gradients to a whole chain."""
  # A NaN would stay in a momentum that each worker keeps before the exchange.
  core.check_choice("nonfinite", policy, NONFINITE_POLICIES)
  if policy == "skip":
    return transforms.skip_nonfinite(tx, axis_name, wait=True)
  if policy == "zero":
    zero = optax.stateless(lambda updates, params: zero_nonfinite(updates))
    tx = optax.chain(zero, tx)
  return optax.with_extra_args_support(tx)


def check_rates(learning_rate: Any, weight_decay: Any) -> None:
  """Raises unless rates are numbers >= 0 or scalars, or one is a schedule."""
  is_schedule = callable(learning_rate) and not isinstance(learning_rate, type)
  rates = {"learning_rate": learning_rate, "weight_decay": weight_decay}
  for name, value in rates.items():
    if isinstance(value, jax.Array):
      core.check_float(name, value)
      if jnp.ndim(value):
        raise ValueError(
          f"`{name}` must be a scalar, got shape {jnp.shape(value)}."
        )
    elif name != "learning_rate" or not is_schedule:
      core.check_number(name, value, 0)


@note_facts(
  "Sends factors of rank 4, after 1000 steps at full precision.",
  no_stacks="It assumes that an array is one matrix of low rank",
)
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
    axis_name, nonfinite: see `jaxmotion.presets`.

  Example:
    >>> tx = optax.chain(power_sgd("data", rank=2), optax.adamw(3e-4))

  References:
    Vogels, Karimireddy and Jaggi, *PowerSGD: Practical Low-Rank Gradient
    Compression for Distributed Optimization*, arXiv 1905.13727, 2019. Code:
    PyTorch 2.13, distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py;
    epfml/powersgd, commit f07be92 (the alternating form).
  """
  core.check_choice("form", form, ("local", "global", "alternating"))
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

    def schedule(count: Array) -> Array:
      return (count - start) % 2

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
    momentum: factor on the momentum, in [0, 1).
    nesterov: whether the gradient is added once more.
    clip_norm: greatest norm of all workers' gradients together, if they are
      independent; None does not clip.
    warmup: number of updates before `density` is reached; 0 for none.
    min_size: least number of elements of a leaf that is not sent whole.
    axis_name, nonfinite: see `jaxmotion.presets`.

  Example:
    >>> tx = optax.chain(dgc("data", clip_norm=None), optax.sgd(0.5))

  References:
    Lin et al., *Deep Gradient Compression: Reducing the Communication Bandwidth
    for Distributed Training*, arXiv 1712.01887, 2018. Code:
    synxlin/deep-gradient-compression, commit 24673d4.
  """
  core.check_number("density", density, 0, 1, open_low=True)
  core.check_number("momentum", momentum, 0, 1, open_high=True)
  core.check_int("warmup", warmup, 0, 2**31 - 1)
  core.check_int("min_size", min_size, 0)
  options: dict[str, Any] = dict(decay=momentum, nesterov=nesterov)
  whole = codecs.momentum_correction(
    codecs.identity(), masking=False, **options
  )
  factor = density ** (1 / (_STAGES + 1))
  stages = [factor ** (stage + 1) for stage in reversed(range(_STAGES))]
  ladder = [
    codecs.where_smaller(
      codecs.momentum_correction(
        codecs.feedback(codecs.topk(density=share)), masking=True, **options
      ),
      whole,
      min_size=min_size,
      min_dimensions=2,
      # The size of a payload must not decide, or states of levels would differ.
      min_ratio=1e-9,
    )
    for share in (density, *(stages if warmup else ()))
  ]

  # Updates at which each stage ends, the last one at `warmup`.
  ends = [warmup * (stage + 1) // _STAGES for stage in range(_STAGES)]

  def level(count: Array) -> Array:
    # The last stage has level 0.
    return _STAGES - jnp.sum(count >= jnp.asarray(ends, jnp.int32))

  tx = transforms.exchange(
    axis_name,
    ladder if warmup else ladder[0],
    schedule=level if warmup else None,
  )
  if clip_norm is not None:
    core.check_number("clip_norm", clip_norm, 0, open_low=True)
    tx = optax.chain(_clip_locally(clip_norm, axis_name), tx)
  return guard_nonfinite(tx, nonfinite, axis_name)


def _clip_locally(
  clip_norm: float, axis_name: AxisName
) -> optax.GradientTransformation:
  """Scales each worker's gradient to a norm that is at most its share."""

  def clip(updates: PyTree, params: PyTree) -> PyTree:
    del params
    leaves = [a for a in jax.tree.leaves(updates) if a.size]
    if not leaves:
      return updates
    count = core.axis_size(axis_name)
    # In units of the greatest element, whose square may leave float32.
    greatest = functools.reduce(
      jnp.maximum, [jnp.abs(a).max().astype(jnp.float32) for a in leaves]
    )
    unit = jnp.maximum(greatest, _TINY)
    squares = [jnp.sum((a / unit).astype(jnp.float32) ** 2) for a in leaves]
    norm = jnp.sqrt(sum(squares, jnp.float32(_TINY)))
    scale = clip_norm / math.sqrt(count) / unit / norm
    # What is not finite is not clipped; the policy decides about it.
    scale = jnp.where(jnp.isfinite(greatest), jnp.minimum(scale, 1.0), 1.0)
    return jax.tree.map(lambda a: (a * scale).astype(a.dtype), updates)

  return optax.stateless(clip)


@_NEEDS_SGD
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
    min_size: least number of elements of a leaf that is not sent whole.
    axis_name, nonfinite: see `jaxmotion.presets`.

  Example:
    >>> tx = optax.chain(ef21_sgdm("data"), optax.sgd(0.5))

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
  later = codecs.topk(density=0.01) if codec is None else codec
  # From the same state, first of whole differences and then of few elements.
  ladder = [
    codecs.where_smaller(
      codecs.ef21(own), min_size=min_size, min_dimensions=2, min_ratio=1e-9
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
  return guard_nonfinite(tx, nonfinite, axis_name)


def _average(decay: float) -> optax.GradientTransformation:
  """Averages gradients, from the first one on."""

  def init(params: PyTree) -> optax.EmaState:
    zeros = jax.tree.map(jnp.zeros_like, params)
    return optax.EmaState(jnp.zeros((), jnp.int32), zeros)

  def update(
    updates: PyTree, state: optax.EmaState, params: PyTree | None = None
  ) -> tuple[PyTree, optax.EmaState]:
    del params
    old = jnp.where(state.count > 0, decay, 0.0)
    average = jax.tree.map(
      lambda v, g: (old * v + (1 - old) * g).astype(g.dtype),
      state.ema,
      updates,
    )
    count = optax.safe_increment(state.count)
    return average, optax.EmaState(count, average)

  return optax.GradientTransformation(init, update)


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
    tx: optimizer that treats every element by itself, as for `sharded`.
    seed: seed of stochastic rounding, in [0, 2^32).
    axis_name, nonfinite: see `jaxmotion.presets`.

  Example:
    >>> tx = sdp4bit("data", optax.adamw(3e-4))

  References:
    Jia et al., *SDP4Bit: Toward 4-bit Communication Quantization in Sharded
    Data Parallelism for LLM Training*, arXiv 2410.15526, 2024. Code:
    jindajia/SDP4Bit, commit ed75187.
  """
  within = codecs.uniform(bits=8, block=512, rounding="stochastic")
  between = codecs.chain(
    codecs.rotate(block=32),
    codecs.uniform(bits=4, block=128, rounding="stochastic"),
  )
  return transforms.sharded(
    axis_name,
    tx,
    gradient_codec=between,
    weight_codec=codecs.uniform(bits=4, block=2048),
    nonfinite=nonfinite,
    seed=seed,
    local_codec=within if isinstance(axis_name, core.HostAxes) else None,
  )


def _make_nesterov(
  axis_name: AxisName, codec: codecs.Codec | None, rate: float, momentum: float
) -> optax.GradientTransformationExtraArgs:
  """Makes the outer chain of local updates: an exchange and Nesterov's SGD."""
  core.check_number("outer_rate", rate, 0, open_low=True)
  core.check_number("outer_momentum", momentum, 0, 1, open_high=True)
  nesterov = optax.sgd(rate, momentum=momentum, nesterov=True)
  return optax.chain(transforms.exchange(axis_name, codec), nesterov)


def _refuse_options(
  preset: str, scheme: str, names: Sequence[str], options: Mapping[str, Any]
) -> None:
  """Raises if options that a preset sets itself are given to it."""
  for name in names:
    if name in options:
      raise TypeError(
        f"`{name}` must not be given to `{preset}`, which sets it, got "
        f"{options[name]!r}: call `{scheme}` for others."
      )


@note_facts(_APART)
def diloco(
  inner: optax.GradientTransformation,
  *,
  every: int = 500,
  outer_rate: float = 0.7,
  outer_momentum: float = 0.9,
  codec: codecs.Codec | None = None,
  axis_name: AxisName = "data",
  **options: Any,
) -> transforms.Scheme:
  """Makes the scheme `local_updates` with Nesterov's momentum outside (DiLoCo).

  Each worker trains by itself for 500 steps. Then the mean of what they have
  changed is the gradient of gradient descent with Nesterov's momentum. The
  paper's inner optimizer is AdamW.

  Ours differs from the paper thus. Workers may have unequal weights
  (`weight_fn`). With `nonfinite="skip"`, a worker whose parameters are not
  finite begins at the anchor, and nothing is sent in that round. Payloads go
  through a codec, if there is one.

  Args:
    codec: codec of what workers have changed; None is full precision.
    inner, every, outer_rate, outer_momentum, axis_name: see
      `jaxmotion.presets`.
    **options: other arguments of `local_updates`, such as `mix`.

  Example:
    >>> scheme = diloco(optax.adamw(4e-4), every=100)

  References:
    Douillard et al., *DiLoCo: Distributed Low-Communication Training of
    Language Models*, arXiv 2311.08105, 2023.
  """
  _refuse_options("diloco", "local_updates", ("outer",), options)
  outer = _make_nesterov(axis_name, codec, outer_rate, outer_momentum)
  return transforms.local_updates(inner, outer, every=every, **options)


@note_facts(_APART)
def streaming_diloco(
  inner: optax.GradientTransformation,
  *,
  every: int = 100,
  fragments: int = 4,
  delay: int = 1,
  mix: float = 0.5,
  outer_rate: float = 0.4,
  outer_momentum: float = 0.9,
  codec: codecs.Codec | None = _INT4,
  axis_name: AxisName = "data",
  **options: Any,
) -> transforms.Scheme:
  """Makes the scheme `local_updates` that sends a fragment at a time in 4 bits.

  A quarter of the parameters is sent every 25 steps, lands a step later, and
  workers keep half of their own then.

  Ours differs from the paper thus. Payloads are evenly spaced levels of 4 bits
  after a rotation, with error memory. The paper's are E3M0, a sign and a power
  of two (`codecs.microscaling(format="float4_e3m0")`), without error memory,
  gathered by all workers and added in float32. Fragments are leaves dealt out
  by size; the paper's are three layers each. The number of fragments is fixed,
  not that of layers in one. A fragment is sent beside the steps that follow
  between CPU hosts alone (`overlap`).

  Args:
    fragments: number of parts of the parameters, a divisor of `every`.
    delay: number of steps between sending and landing, less than `every`.
    mix: share of its own parameters that a worker keeps, in [0, 1).
    codec: codec of what workers have changed; None is full precision.
    inner, every, outer_rate, outer_momentum, axis_name: see
      `jaxmotion.presets`.
    **options: other arguments of `local_updates`, such as `parts`.

  Example:
    >>> scheme = streaming_diloco(optax.adamw(4e-4), every=40, fragments=2)

  References:
    Douillard et al., *Streaming DiLoCo with overlapping communication: Towards
    a Distributed Free Lunch*, arXiv 2501.18512, 2025.
  """
  _refuse_options("streaming_diloco", "local_updates", ("outer",), options)
  outer = _make_nesterov(axis_name, codec, outer_rate, outer_momentum)
  options |= dict(every=every, fragments=fragments, delay=delay, mix=mix)
  return transforms.local_updates(inner, outer, **options)


@note_facts(
  f"Replaces the optimizer by Muon. {_APART}",
  matrices="It assumes matrices, which it orthogonalizes",
  no_lookups="It orthogonalizes every matrix, which is wrong for a table",
)
def muloco(
  learning_rate: optax.ScalarOrSchedule,
  *,
  weight_decay: float = 0.0,
  every: int = 30,
  outer_rate: float = 0.7,
  outer_momentum: float = 0.9,
  codec: codecs.Codec | None = _INT2,
  axis_name: AxisName = "data",
  **options: Any,
) -> transforms.Scheme:
  """Makes the scheme `local_updates` with Muon inside and 2 bits outside.

  Muon's changes of a matrix have equal singular values, which few bits keep
  better than those of AdamW. Leaves that are no matrices take AdamW, as in
  `optax.contrib.muon`.

  Ours differs from the paper thus. Levels are evenly spaced for blocks of
  elements. The outer rate and momentum are DiLoCo's; the paper tunes them.

  Args:
    learning_rate: of Muon, a number or a schedule of the worker's steps.
    weight_decay: of the inner optimizer.
    codec: codec of what workers have changed; None is full precision.
    every, outer_rate, outer_momentum, axis_name: see `jaxmotion.presets`.
    **options: other arguments of `local_updates`, such as `fragments`.

  Raises:
    ValueError: explicit axes of the model, which Muon cannot be traced on.

  Example:
    >>> scheme = muloco(0.02, every=30)

  References:
    Thérien, Huang, Rish and Belilovsky, *MuLoCo: Muon is a practical inner
    optimizer for DiLoCo*, arXiv 2505.23725, 2025.
  """
  _refuse_options("muloco", "local_updates", ("inner", "outer"), options)
  check_rates(learning_rate, weight_decay)
  muon = optax.contrib.muon(
    learning_rate, weight_decay=weight_decay, adam_weight_decay=weight_decay
  )

  def init(params: PyTree) -> optax.OptState:
    types = jax.sharding.get_abstract_mesh().axis_types
    if jax.sharding.AxisType.Explicit in types:
      raise ValueError(
        "`mesh` must have Auto axes of the model, because Muon multiplies "
        "matrices whose shards explicit axes do not join, got "
        f"{types}: give jax.make_mesh axis_types=(AxisType.Auto, ...), "
        "or take `diloco`."
      )
    return muon.init(params)

  inner = optax.GradientTransformation(init, muon.update)
  outer = _make_nesterov(axis_name, codec, outer_rate, outer_momentum)
  return transforms.local_updates(inner, outer, every=every, **options)


@note_facts(
  "Each worker keeps a part of all state, in fewer bits.",
  gathered_blocks="It assumes a loss that gathers its blocks by "
  "`transforms.gather_block`",
)
def zeropp(
  tx: optax.GradientTransformation | optax.MultiSteps, **options: Any
) -> transforms.Scheme:
  """Makes the scheme `fully_sharded` with 8-bit weights and 4-bit gradients.

  Weights are gathered in 8 bits, blocks of 2048 (qwZ): between hosts once a
  step, within a host once more in the backward pass (hpZ). Gradients are
  averaged in 4 bits, blocks of 128, within a host and then between hosts (qgZ).
  `make_train_step` tells the scheme the hosts, as `HostAxes`. Without them
  weights are gathered twice over all workers.

  Ours differs from the reference thus. Gradients are divided by all workers.
  The reference divides those of matrices by the hosts alone, so they are larger
  than those of vectors by the devices of a host. Levels are symmetric, so a
  positive maximum is kept; the reference cuts it to 7/8. Vectors are encoded as
  matrices are. Leaves of fewer than 64 elements per worker are averaged in
  float32.

  Args:
    tx: optimizer that treats every element by itself.
    **options: other arguments of `fully_sharded`, such as `stacked`.

  Example:
    >>> scheme = zeropp(optax.adam(1e-3), nonfinite="skip")

  References:
    Wang et al., *ZeRO++: Extremely Efficient Collective Communication for Giant
    Model Training*, arXiv 2306.10209, 2023. Code: deepspeedai/DeepSpeed, commit
    edaa722, runtime/comm/coalesced_collectives.py.
  """
  names = ("weight_codec", "gradient_codec", "local_codec", "regather")
  _refuse_options("zeropp", "fully_sharded", names, options)
  int4 = codecs.uniform(bits=4, block=128)
  make = functools.partial(
    transforms.fully_sharded,
    tx,
    weight_codec=codecs.uniform(bits=8, block=2048),
    gradient_codec=int4,
    **options,
  )
  return _Zeropp(make(local_codec=int4, regather="local"), make())


@dataclasses.dataclass(frozen=True)
class _Zeropp(transforms.Scheme):
  """Scheme that is another one with hosts than without."""

  with_hosts: transforms.Scheme
  without_hosts: transforms.Scheme

  def for_workers(self, workers: extend.Workers) -> transforms.Scheme:
    """Returns the scheme for these workers."""
    has_hosts = workers.host_axes is not None
    return self.with_hosts if has_hosts else self.without_hosts
