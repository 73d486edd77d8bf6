"""Presets of schemes of training: workers train apart, or divide all state."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from jaxmotion import codecs, core, transforms
from jaxmotion.core import AxisName, PyTree
from jaxmotion.presets._exchanges import NOTE_APART, note_facts
from jaxmotion.presets._optimizers import RATES
from jaxmotion.transforms import extend

_INT2 = codecs.feedback(codecs.uniform(bits=2))
_INT4 = codecs.feedback(codecs.chain(codecs.rotate(), codecs.uniform(bits=4)))


@note_facts(NOTE_APART)
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
    all: see `jaxmotion.presets`.

  Example:
    >>> scheme = diloco(optax.adamw(4e-4), every=100)

  References:
    Douillard et al., *DiLoCo: Distributed Low-Communication Training of
    Language Models*, arXiv 2311.08105, 2023.
  """
  _refuse_options("diloco", "local_updates", ("outer",), options)
  outer = _make_nesterov(axis_name, codec, outer_rate, outer_momentum)
  return transforms.local_updates(inner, outer, every=every, **options)


@note_facts(NOTE_APART)
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
    others: see `jaxmotion.presets`.

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
  f"Replaces the optimizer by Muon. {NOTE_APART}",
  matrices="It assumes matrices, which it orthogonalizes",
  no_lookups="It orthogonalizes every matrix, which is wrong for a table",
)
@core.declare(**RATES)
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
    others: see `jaxmotion.presets`.

  Raises:
    ValueError: explicit axes of the model, which Muon cannot be traced on.

  Example:
    >>> scheme = muloco(0.02, every=30)

  References:
    Thérien, Huang, Rish and Belilovsky, *MuLoCo: Muon is a practical inner
    optimizer for DiLoCo*, arXiv 2505.23725, 2025.
  """
  _refuse_options("muloco", "local_updates", ("inner", "outer"), options)
  muon = optax.contrib.muon(
    learning_rate, weight_decay=weight_decay, adam_weight_decay=weight_decay
  )

  def init_muon(params: PyTree) -> optax.OptState:
    """Returns Muon's state; refuses axes on which its products fail."""
    types = jax.sharding.get_abstract_mesh().axis_types
    if jax.sharding.AxisType.Explicit in types:
      raise ValueError(
        "`mesh` must have Auto axes of the model, because Muon multiplies "
        "matrices whose shards explicit axes do not join, got "
        f"{types}: give jax.make_mesh axis_types=(AxisType.Auto, ...), "
        "or take `diloco`."
      )
    return muon.init(params)

  inner = optax.GradientTransformation(init_muon, muon.update)
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
    all: see `jaxmotion.presets`.

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
  """Scheme of `zeropp`, whose workers may be devices of hosts or not."""

  with_hosts: transforms.Scheme
  without_hosts: transforms.Scheme

  def for_workers(self, workers: extend.Workers) -> transforms.Scheme:
    """Returns the scheme whose second gather is within a host, if any."""
    has_hosts = workers.host_axes is not None
    return self.with_hosts if has_hosts else self.without_hosts


def _make_nesterov(
  axis_name: AxisName, codec: codecs.Codec | None, rate: float, momentum: float
) -> optax.GradientTransformationExtraArgs:
  """Makes the outer optimizer: an exchange, then SGD with Nesterov momentum."""
  core.number(0, open_low=True)("outer_rate", rate)
  core.number(0, 1, open_high=True)("outer_momentum", momentum)
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
