"""Parameters that live on the host and travel packed."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax

from jaxmotion import codecs
from jaxmotion.core import Array, PyTree, check_choice, check_int


class HostState(NamedTuple):
  """What a host-resident model is between two steps: a pytree to checkpoint.

  Attributes:
    step: int32[], steps taken.
    params: float32 master weights, on the host.
    opt_state: the optimiser's state, on the host; with `update="per_stage"` a
      tuple of one for each stage.
    held: with `delta`, the host's copy of the weights that the device holds;
      otherwise `()`.
    device_held: with `delta`, those weights, on the device, equal to `held`
      bit for bit; otherwise `()`.
    grad_state: state of the gradients' codec, on the device.
    stats: what stages update without gradients, on the device; a tuple of one
      for each stage.
    sent_bytes: int64[], of all payloads that went to the device so far.
    returned_bytes: int64[], of all that came back.
  """

  step: Any
  params: PyTree
  opt_state: PyTree
  held: PyTree
  device_held: PyTree
  grad_state: PyTree
  stats: PyTree
  sent_bytes: Any
  returned_bytes: Any


@dataclasses.dataclass(frozen=True)
class host_resident:
  """Trains a model whose weights and optimiser live on the host.

  In every step the weights go to the device packed by a codec, at the level
  of their group; gradients come back packed; the update is computed where the
  float32 weights are. With `delta`, what goes is encode(w - held), and host
  and device both add decode(encode(w - held)) to `held`: what a step leaves
  out, the next one sends.

  Stages overlap: while the device computes one, the host packs and sends the
  next; gradients of a stage return while those before it are computed.

  Args:
    stages: (name, function) of every stage, in order. A function takes
      (params, x, batch) and returns the next stage's x, a pytree of
      floating-point arrays; the first is given None, the last returns the
      loss, a scalar. Stages with one function and equal shapes share one
      compiled program. Or a single function (params, batch) -> loss.
    tx: optax transformation; it runs on the host.
    weights: codecs, fewest bytes first; a level is a position among them. Or
      one codec.
    grads: codec of the gradients; it may be `feedback`.
    delta: whether differences to what the device holds travel.
    groups: regular expressions, each a group whose leaves share a level: a
      leaf ("name of stage/path") is of the first that is found in its path.
      None: each stage is a group.
    small: leaves of fewer values (biases) travel as float32 both ways, and
      are of no group.
    update: "whole" calls `tx` once, for all parameters, after the backward
      pass. "per_stage" calls it for each stage as soon as its gradients are
      on the host, while others are still computed: only for optimisers that
      look at each value alone (sgd, adam, ..., no norm over all gradients).
    streamed: whether a stage's weights leave the device after its forward pass
      and are sent again for its backward pass, which then recomputes it: the
      device holds two stages' weights at a time, and the inputs of all.
    stateful: whether functions take (params, stats, x, batch) and return
      (x, stats): batch statistics, counters, keys. `stats` stay on the device.
    seed: of stochastic rounding.
    device: where the model computes; the default device if None.

  Raises:
    TypeError: a codec, function or transformation is none.
    ValueError: an option is not among its choices, a codec of weights has
      state (`delta` remembers instead), or `streamed` with `delta`, which
      keeps the weights on the device.
  """

  stages: Callable[..., Any] | Sequence[tuple[str, Callable[..., Any]]]
  tx: optax.GradientTransformation
  _: dataclasses.KW_ONLY
  weights: codecs.Codec | Sequence[codecs.Codec] = codecs.uniform(bits=8)
  grads: codecs.Codec = codecs.uniform(bits=8)
  delta: bool = False
  groups: Sequence[str] | None = None
  small: int = 1024
  update: str = "whole"
  streamed: bool = False
  stateful: bool = False
  seed: int = 0
  device: jax.Device | None = None

  def init(self, params: PyTree, stats: PyTree = None) -> HostState:
    """Returns the state before the first step.

    Args:
      params: {name of stage: pytree} of float32 arrays; of a single function,
        its own pytree. They are copied.
      stats: likewise, of a `stateful` model; stages that have none may be
        left out.

    Raises:
      TypeError: a leaf is not float32.
      ValueError: names are not those of the stages, or a group matches no
        leaf, or a leaf no group.
    """
    raise NotImplementedError

  def step(
    self,
    state: HostState,
    batch: PyTree,
    level: Any = 0,
    *,
    call: Callable[..., Any] = lambda name, piece, *args: piece(*args),
  ) -> tuple[HostState, Array]:
    """Trains on one batch.

    Args:
      state: what `init` or the last `step` returned; its buffers are donated.
      batch: pytree of arrays; goes to the device as it is.
      level: position in `weights` for every group, int[groups], or one int
        for all.
      call: is given (name, piece, *args) and returns piece(*args). All work
        passes through it, under the names "pack", "send", "unpack",
        "forward", "backward", "return" and "update", several times each: the
        way to time them (wait for what a piece returns, and nothing
        overlaps).

    Returns:
      The new state and the loss, float32[], on the device.

    Raises:
      TypeError: `level` is not of integers, or a stage returns others than
        floating-point arrays.
      ValueError: a level out of range, not one for each group, or a loss that
        is no scalar.
    """
    raise NotImplementedError

  def group_names(self, params: PyTree) -> tuple[str, ...]:
    """Returns what each group is called: its stage, or its pattern."""
    raise NotImplementedError

  def norms(self, state: HostState) -> Array:
    """Returns the L2 norm of every group's weights, float32[groups]."""
    raise NotImplementedError

  def plain_bytes(self, params: PyTree) -> int:
    """Returns the bytes that float32 would move each way in one step."""
    raise NotImplementedError

  def __post_init__(self) -> None:
    check_choice("update", self.update, ("whole", "per_stage"))
    check_int("small", self.small, 0)
    check_int("seed", self.seed, 0)
