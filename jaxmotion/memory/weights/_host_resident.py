"""Parameters that live on the host and travel packed."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmotion.codecs import Codec, identity, uniform
from jaxmotion.controllers import Groups, group_norms
from jaxmotion.core import Array, PyTree, abstract_like, check_choice, check_int
from jaxmotion.memory.weights import _state as states
from jaxmotion.memory.weights._device_bytes import (
  Request,
  device_bytes,
  temp_bytes,
)
from jaxmotion.memory.weights._layout import Layout, check_level, layout_of
from jaxmotion.memory.weights._programs import Body
from jaxmotion.memory.weights._state import HostState
from jaxmotion.memory.weights._step import Step, plain
from jaxmotion.wire import payload_bytes

_INT8 = uniform(bits=8)


@dataclasses.dataclass(frozen=True)
class HostResident:
  """Trains a model whose weights and optimiser live on the host.

  In every step the weights go to the device packed by a codec, at the level
  of their group; gradients come back packed; the update is computed where the
  float32 weights are. With `send_difference`, what goes is encode(w - reference), and host
  and device both add decode(encode(w - reference)) to `reference`, zero at the start:
  what a step leaves out, the next one sends.

  Stages overlap: while the device computes one, the host packs and sends the
  next; gradients of a stage return while those before it are computed.

  Non-finite values: without `send_difference` they travel as their codec says. With it
  a difference that is not finite counts as zero, so that `reference` stays finite.
  A gradient that is not finite reaches `tx`: guard it with
  `optax.apply_if_finite`.

  Args:
    stages: (name, function) of every stage, in order. A function takes
      (params, x, batch) and returns the next stage's x, a pytree of
      floating-point arrays; the first is given None, the last returns the
      loss, a scalar. Stages with one function and equal shapes share one
      compiled program. Or a single function (params, batch) -> loss.
    tx: optax transformation; it runs on the host.
    weights: codecs of arrays, fewest bytes first; a level is a position among
      them. Or one codec.
    grads: codec of the gradients; it may be `feedback`.
    send_difference: whether differences to what the device holds travel.
    groups: which weights share a level, as rules of `controllers.group_by` for
      the paths "name of stage/..."; what is of no group travels as float32
      both ways. None: each stage is a group.
    min_leaf_size: leaves of fewer values (biases) are of no group.
    update: "once" calls `tx` once, for all parameters, after the backward
      pass. "per_stage" calls it for each stage as soon as its gradients are
      on the host, while others are still computed: only for optimisers that
      look at each value alone (sgd, adam, ..., no norm over all gradients).
    stream_weights: whether a stage's weights leave the device after its forward pass
      and are sent again for its backward pass, which then recomputes it: the
      device holds two stages' weights at a time, and the inputs of all.
    stateful: whether functions take (params, stats, x, batch) and return
      (x, stats): batch statistics, counters, keys. `stats` stay on the device.
    seed: of stochastic rounding.
    device: where the model computes; JAX's first device if None.

  Raises:
    TypeError: a codec, function or transformation is none.
    ValueError: an option is not among its choices; a codec of weights has
      state (`send_difference` remembers instead), or makes fewer bytes than the one
      before; two stages have one name; `stream_weights` with `send_difference`, which keeps
      the weights on the device.

  Example:
    >>> import optax
    >>> from jaxmotion.codecs import uniform
    >>> def loss_fn(params, batch):
    ...   return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    >>> ladder = [uniform(bits=4), uniform(bits=8)]
    >>> model = HostResident(loss_fn, optax.sgd(0.1), weights=ladder, min_leaf_size=0)
    >>> state = model.init({"w": jnp.zeros((2, 1))})
    >>> batch = {"x": jnp.eye(2), "y": jnp.ones((2, 1))}
    >>> state, loss = model.step(state, batch, level=1)
    >>> float(loss), int(state.sent_bytes), int(state.returned_bytes)
    (1.0, 8, 8)

  References:
    Zhuang, Malossi and Casas, *Reducing Data Motion to Accelerate the Training
    of Deep Neural Networks*, 2020 (weights packed on the host; the gradients
    return as float32 there, and nothing is remembered).
  """

  stages: Callable[..., Any] | Sequence[tuple[str, Callable[..., Any]]]
  tx: optax.GradientTransformation
  _: dataclasses.KW_ONLY
  weights: Codec | Sequence[Codec] = _INT8
  grads: Codec = _INT8
  send_difference: bool = False
  groups: Sequence[tuple[str, str | None]] | None = None
  min_leaf_size: int = 1024
  update: str = "once"
  stream_weights: bool = False
  stateful: bool = False
  seed: int = 0
  device: jax.Device | None = None

  def __post_init__(self) -> None:
    check_choice("update", self.update, ("once", "per_stage"))
    for flag in ("send_difference", "stream_weights", "stateful"):
      check_choice(flag, getattr(self, flag), (True, False))
    check_int("min_leaf_size", self.min_leaf_size, 0)
    check_int("seed", self.seed, 0, 2**32 - 1)
    if self.stream_weights and self.send_difference:
      raise ValueError(
        "`stream_weights` must be False with `send_difference`, which keeps the weights on "
        "the device, got True."
      )
    if not isinstance(self.tx, optax.GradientTransformation):
      raise TypeError(
        f"`tx` must be an optax.GradientTransformation, got {self.tx!r}."
      )
    _check_codec("grads", self.grads)
    # Tuples: what is compiled is looked up by what it was made of.
    object.__setattr__(self, "weights", _ladder(self.weights))
    if self.groups is not None:
      object.__setattr__(self, "groups", tuple(map(tuple, self.groups)))
    if not callable(self.stages):
      object.__setattr__(self, "stages", _pairs(self.stages))

  @property
  def host(self) -> jax.Device:
    """The device of JAX's CPU backend: weights and optimiser are there."""
    return jax.local_devices(backend="cpu")[0]

  @property
  def target(self) -> jax.Device:
    """The device that computes."""
    return self.device or jax.local_devices()[0]

  @property
  def bodies(self) -> tuple[Body, ...]:
    """The stages' functions, all of one signature."""
    if callable(self.stages):
      return (Body(self.stages, False, self.stateful),)
    return tuple(Body(fn, True, self.stateful) for _, fn in self.stages)

  @property
  def ladder(self) -> tuple[Codec, ...]:
    """The weights' codecs, one for each level."""
    return cast(tuple[Codec, ...], self.weights)

  @property
  def names(self) -> tuple[str, ...] | None:
    """The stages' names; None for a single function."""
    if callable(self.stages):
      return None
    return tuple(name for name, _ in self.stages)

  def init(self, params: PyTree, stats: PyTree = None) -> HostState:
    """Returns the state before the first step.

    Args:
      params: {name of stage: pytree} of float32 arrays; of a single function,
        its own pytree. They are copied.
      stats: likewise, of a `stateful` model; stages that have none may be
        left out.

    Raises:
      TypeError: a leaf is not float32.
      ValueError: names are not those of the stages, or a rule of `groups` is
        wrong.
    """
    layout = self._layout(params)
    params = jax.tree.map(np.array, params)
    held = states.init_held(layout) if self.send_difference else ()
    codecs = layout.leaf_codecs(self.grads)
    with jax.default_device(self.host):
      state = HostState(
        step=np.int32(0),
        params=params,
        opt_state=states.init_tx(self.tx, layout, params, self.update),
        reference=held,
        device_reference=held,
        grad_state=states.init_grads(layout, codecs),
        stats=self._stats(stats),
        sent_bytes=np.int64(0),
        returned_bytes=np.int64(0),
      )
    return self.place_state(state)

  def place_state(self, state: HostState) -> HostState:
    """Returns a state, one from a checkpoint say, with all of it in its place.

    Args:
      state: of JAX or NumPy arrays, wherever they are.
    """
    host, target = self.host, self.target
    return state._replace(
      params=jax.device_put(state.params, host),
      opt_state=jax.device_put(state.opt_state, host),
      reference=jax.device_put(state.reference, host),
      device_reference=jax.device_put(state.device_reference, target),
      grad_state=jax.device_put(state.grad_state, target),
      stats=jax.device_put(state.stats, target),
    )

  def step(
    self,
    state: HostState,
    batch: PyTree,
    level: Any = 0,
    *,
    run_op: Callable[..., Any] = plain,
  ) -> tuple[HostState, Array]:
    """Trains on one batch.

    Args:
      state: what `init` or the last `step` returned; its buffers are donated.
      batch: pytree of arrays; goes to the device as it is.
      level: position in `weights` for every group, int[groups], or one int
        for all.
      run_op: is given (name, piece, *args) and returns piece(*args). All work
        passes through it, under the names "pack", "send", "unpack",
        "forward", "backward", "return" and "update", several times each: the
        way to time them (wait for what a piece returns, and nothing
        overlaps).

    Returns:
      The new state and the loss, a scalar on the device.

    Raises:
      TypeError: `level` is not of integers, or a stage returns others than
        floating-point arrays.
      ValueError: a level out of range, not one for each group, or a loss that
        is no scalar.
    """
    step = self._step(state, level, run_op)
    loss = step.run(batch)
    return step.state(), loss

  def groups_of(self, params: PyTree) -> Groups:
    """Returns the groups, in the order of levels, norms and errors.

    Args:
      params: as for `init`.
    """
    return self._layout(params).groups

  def norms(self, state: HostState) -> Array:
    """Returns the L2 norm of every group's master weights, float32[groups].

    Args:
      state: as for `step`.
    """
    return _norms(state.params, self.groups_of(state.params))

  def errors(self, state: HostState, level: Any = 0) -> Array:
    """Returns the relative L2 error of every group's weights as they travel.

    With w the master weights and y what the device would compute with if the
    next step were at this level: ||y - w|| / ||w||, 0 where w is 0. Computed
    on the host, at about the cost of packing and unpacking.

    Args:
      state: as for `step`; nothing is donated.
      level: as for `step`.

    Returns:
      float32[groups].
    """
    return _relative(
      self._step(state, level).squared_errors(), self.norms(state)
    )

  def device_bytes(
    self,
    params: PyTree,
    batch: PyTree,
    stats: PyTree = None,
    level: Any = 0,
    *,
    measure_memory: Callable[..., int] = temp_bytes,
  ) -> int:
    """Returns the most bytes that the device holds in a step, before any.

    Of weights, payloads, inputs of stages, residuals, gradients on their way,
    and of what the programs take in between, each compiled once: two that
    follow each other count as if they ran at once, as they may where the first
    is not yet done. On the host are `params` and the optimiser's state.

    Args:
      params: as for `init`, or their shapes.
      batch: as for `step`, or its shapes.
      stats: as for `init`, or their shapes.
      level: as for `step`.
      measure_memory: `measure_memory(fn, *args)` compiles a function for such
        arguments and returns the bytes it takes besides arguments and results;
        by default it is asked of JAX's backend. It may be a compiler for
        another device than is there.

    Raises:
      TypeError, ValueError: as by `init` and `step`.

    Example:
      >>> def loss_fn(params, batch):
      ...   return jnp.mean((batch @ params) ** 2)
      >>> w = jax.ShapeDtypeStruct((256, 256), "float32")
      >>> batch = jax.ShapeDtypeStruct((64, 256), "float32")
      >>> model = HostResident(loss_fn, optax.sgd(0.1))
      >>> model.device_bytes(w, batch) < model.plain_bytes(w) * 4
      True
    """
    layout = self._layout(params)
    codecs = layout.leaf_codecs(self.grads)
    grad_state = jax.eval_shape(lambda: states.init_grads(layout, codecs))
    levels = check_level(level, layout.groups, len(self.ladder))
    shapes = jax.tree.map(abstract_like, (self._stats(stats), batch))
    request = Request(self, layout, codecs, levels, grad_state, *shapes)
    return device_bytes(request, measure_memory)

  def plain_bytes(self, params: PyTree) -> int:
    """Returns the bytes of the parameters: what float32 moves each way.

    Args:
      params: as for `init`.
    """
    return payload_bytes(identity(), params)

  def _step(self, state: HostState, level: Any, *run_op: Any) -> Step:
    layout = self._layout(state.params)
    levels = check_level(level, layout.groups, len(self.ladder))
    return Step(self, layout, state, levels, *run_op)

  def _layout(self, params: PyTree) -> Layout:
    return layout_of(params, self.names, self.groups, self.min_leaf_size)

  def _stats(self, stats: PyTree) -> tuple[PyTree, ...]:
    if stats is not None and not self.stateful:
      raise ValueError("`stats` must be None unless `stateful`, got some.")
    if self.names is None:
      return (() if stats is None else stats,)
    given = {} if stats is None else stats
    if not isinstance(given, Mapping) or not set(given) <= set(self.names):
      found = sorted(given) if isinstance(given, Mapping) else type(given)
      raise ValueError(
        f"`stats` must be a mapping of stages among {sorted(self.names)}, "
        f"got {found!r}."
      )
    return tuple(given.get(name, ()) for name in self.names)


_norms = functools.partial(jax.jit, static_argnums=1)(group_norms)


@jax.jit
def _relative(squares: Sequence[Array], norms: Array) -> Array:
  ratio = jnp.sqrt(jnp.stack(squares)) / norms
  return jnp.where(norms > 0, ratio, 0.0)


def _check_codec(name: str, codec: Any) -> None:
  if not isinstance(codec, Codec) or codec.is_tree:
    raise TypeError(f"`{name}` must be a codec of arrays, got {codec!r}.")


def _ladder(weights: Any) -> tuple[Codec, ...]:
  ladder = (weights,) if isinstance(weights, Codec) else tuple(weights)
  if not ladder:
    raise ValueError("`weights` must hold at least one codec, got none.")
  sample = jax.ShapeDtypeStruct((2**16,), jnp.float32)
  for codec in ladder:
    _check_codec("weights", codec)
    if jax.tree.leaves(jax.eval_shape(codec.init, sample)):
      raise ValueError(
        f"`weights` must be codecs without state, got {codec!r}: `send_difference` "
        "remembers what was not sent."
      )
  sizes = [payload_bytes(codec, sample) for codec in ladder]
  if sizes != sorted(sizes):
    raise ValueError(
      f"`weights` must be ordered from fewest to most bytes, got {ladder!r}."
    )
  return ladder


def _pairs(stages: Any) -> tuple[tuple[str, Callable[..., Any]], ...]:
  pairs = tuple(map(tuple, stages))
  if not pairs:
    raise ValueError("`stages` must hold at least one stage, got none.")
  for pair in pairs:
    if len(pair) != 2 or not isinstance(pair[0], str) or not callable(pair[1]):
      raise TypeError(
        f"`stages` must be pairs of a name and a function, got {pair!r}."
      )
  names = [name for name, _ in pairs]
  if len(set(names)) < len(names):
    raise ValueError(f"`stages` must have different names, got {names!r}.")
  return pairs
