"""`HostResident`: training with weights and optimizer state on the host."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmotion import controllers, core, wire
from jaxmotion.codecs import Codec, identity, uniform
from jaxmotion.codecs.extend import check_codec
from jaxmotion.core import Array, PyTree
from jaxmotion.memory import _check_separate
from jaxmotion.memory._weights import (
  _device_bytes,
  _layout,
  _programs,
  _state,
  _step,
)

_INT8 = uniform(bits=8)


def _stages(name: str, value: Any) -> Any:
  """Returns a function, or stages as a tuple of pairs; or raises."""
  if callable(value):
    return value
  noun = "pairs of a name and a function, or one function"
  pairs = core.sequence(noun)(name, value)
  if not pairs:
    raise ValueError(f"`{name}` must hold at least one stage, got none.")
  for pair in pairs:
    is_pair = isinstance(pair, list | tuple) and len(pair) == 2
    if not is_pair or not isinstance(pair[0], str) or not callable(pair[1]):
      raise TypeError(
        f"`{name}` must be pairs of a name and a function, got {pair!r}."
      )
  names = [stage for stage, _ in pairs]
  if len(set(names)) < len(names):
    raise ValueError(f"`{name}` must have different names, got {names!r}.")
  return tuple(map(tuple, pairs))


def _level_codecs(name: str, value: Any) -> Any:
  """Returns one codec, or a tuple of one for each level; or raises."""
  is_one = isinstance(value, Codec)
  many = (value,) if is_one else value
  codecs = core.sequence("codecs, or one codec", check_codec)(name, many)
  if not codecs:
    raise ValueError(f"`{name}` must hold at least one codec, got none.")
  sample = jax.ShapeDtypeStruct((2**16,), jnp.float32)
  for codec in codecs:
    if codec.has_state:
      raise ValueError(
        f"`{name}` must be codecs without state, got {codec!r}: use "
        "`send_difference`, which sends later what was left out."
      )
  sizes = [wire.payload_bytes(codec, sample) for codec in codecs]
  if sizes != sorted(sizes):
    raise ValueError(
      f"`{name}` must be ordered from fewest to most bytes, got {codecs!r}."
    )
  return value if is_one else codecs


def _group_rules(name: str, value: Any) -> tuple[Any, ...]:
  """Returns rules of groups as a tuple of pairs, or raises."""
  # Tuples, because options are part of the keys of compiled programs.
  rules = core.sequence("pairs of a pattern and a name")(name, value)
  return tuple(core.PathRules(rules, name, "name of a group or None"))


def _device_dtype(name: str, value: Any) -> str:
  """Returns the name of a dtype, or raises."""
  dtype = value
  with contextlib.suppress(TypeError):
    dtype = jnp.dtype(value).name if value is not None else None
  return cast(str, core.choice(_layout.DEVICE_DTYPES)(name, dtype))


def _host_state(name: str, state: Any) -> Any:
  """Returns a state that `init` returns, or raises."""
  core.instance(_state.HostState, "a HostState")(name, state)
  _layout.outside_jit(name, state)
  if np.shape(state.step) != ():
    raise ValueError(
      f"`{name}` must be that of `init`, got a step of shape "
      f"{np.shape(state.step)}, not ()."
    )
  return state


@dataclasses.dataclass(frozen=True)
@core.declare(
  stages=_stages,
  tx=_check_separate.transformation,
  weights=_level_codecs,
  grads=check_codec,
  send_difference=core.boolean,
  groups=core.optional(_group_rules),
  min_leaf_size=core.integer(0),
  update=core.choice(("once", "per_stage")),
  stream_weights=core.boolean,
  stateful=core.boolean,
  seed=core.seed,
  device_dtype=_device_dtype,
  device=core.optional(core.instance(jax.Device, "a JAX device or None")),
)
class HostResident:
  """Trains a model whose float32 weights and optimizer state are on the host.

  In every step the host encodes the weights, each group of them at its level,
  and sends them to the device. The device returns encoded gradients, and the
  host computes the update.

  With `send_difference`, the host sends encode(w - reference). Host and device
  both add decode(encode(w - reference)) to their reference, which starts at
  zero and which the device computes with. A later step therefore sends what
  the codec left out of this one.

  Stages overlap. While the device computes one stage, the host encodes and
  sends the next. Gradients of a stage return while the device computes those
  of the stage before it.

  Non-finite values: without `send_difference` the codec decides what becomes of
  a non-finite weight. With it, a non-finite difference counts as zero, so that
  the reference stays finite. A non-finite gradient reaches `tx`: guard it with
  `optax.apply_if_finite`.

  Args:
    stages: (name, function) of every stage, in order. A function takes
      (params, x, batch) and returns the next stage's x, a pytree of
      floating-point arrays. The first x is None; the last stage returns the
      loss, a scalar. Stages with one function and equal shapes share one
      compiled program. Or a single function (params, batch) -> loss.
    tx: optax transformation, which runs on the host.
    weights: codec of the weights, a codec of arrays without state. Or a
      sequence of them, fewest bytes first: a level is a position in it.
    grads: codec of the gradients; it may be `feedback`.
    send_difference: whether the host sends differences to the weights that the
      device already holds, instead of the weights.
    groups: rules of `controllers.group_by` for the paths "name of stage/...":
      which weights share a level. Leaves of no group travel as float32 both
      ways. None makes each stage a group.
    min_leaf_size: number of elements. Leaves of fewer (biases) are in no group.
    update: "once" calls `tx` once for all parameters, after the backward pass.
      "per_stage" calls it for each stage, the first one first. The next step
      begins as soon as that stage is updated, and the host updates the others
      while the device computes. `tx` must then update each array from the
      array's own gradient: a norm over all gradients is refused.
    stream_weights: whether a stage's weights leave the device after its forward
      pass and are sent again for its backward pass, which then recomputes the
      stage. The device holds the weights of two stages at a time, and the
      inputs of all.
    stateful: whether functions take (params, stats, x, batch) and return
      (x, stats): batch statistics, counters, keys. `stats` stay on the device.
    seed: seed of stochastic rounding, in [0, 2**32).
    device_dtype: dtype of weights and gradients on the device, "float32",
      "bfloat16" or "float16". Weights are rounded to it, then encoded. The
      weights on the host stay float32, and so does the update.
    device: JAX device that computes; the first local one if None.

  Raises:
    TypeError: a codec, function or transformation is of the wrong type.
    ValueError: an option is not among its choices. A codec of weights has state
      (use `send_difference` instead), or takes fewer bytes than the one before
      it. Two stages have one name. `stream_weights` is combined with
      `send_difference`, which keeps the weights on the device.

  Example:
    >>> import optax
    >>> from jaxmotion.codecs import uniform
    >>> def loss_fn(params, batch):
    ...   return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    >>> levels = [uniform(bits=4), uniform(bits=8)]
    >>> model = HostResident(
    ...   loss_fn, optax.sgd(0.1), weights=levels, min_leaf_size=0
    ... )
    >>> state = model.init({"w": jnp.zeros((2, 1))})
    >>> batch = {"x": jnp.eye(2), "y": jnp.ones((2, 1))}
    >>> state, loss = model.step(state, batch, level=1)
    >>> float(loss), int(state.sent_bytes), int(state.returned_bytes)
    (1.0, 8, 8)

  References:
    Zhuang, Malossi and Casas, *Reducing Data Motion to Accelerate the Training
    of Deep Neural Networks*, 2020 (A2DTWP). There the host encodes the weights,
    the gradients return as float32, and there is no reference.
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
  device_dtype: Any = "float32"
  device: jax.Device | None = None

  def __post_init__(self) -> None:
    if self.stream_weights and self.send_difference:
      raise ValueError(
        "`stream_weights` must be False with `send_difference`, which keeps "
        "the weights on the device, got True."
      )

  @core.declare(params=_layout.outside_jit)
  def init(self, params: PyTree, stats: PyTree = None) -> _state.HostState:
    """Returns the state before the first step.

    Args:
      params: {name of stage: pytree} of float32 arrays, or of arrays of
        `device_dtype`; for a single function, its own pytree. They are copied
        as float32.
      stats: {name of stage: pytree} of a `stateful` model, stages without stats
        left out; for a single function, its own pytree.

    Raises:
      TypeError: a leaf is neither float32 nor of `device_dtype`.
      ValueError: names are not those of the stages, or a rule of `groups` is
        wrong. Stages are updated one after another, and `tx` updates an array
        from the gradient of another.
    """
    spec = self._spec(params)
    params = jax.tree.map(lambda x: np.array(x, np.float32), params)
    reference = _state.init_reference(spec)
    with jax.default_device(spec.host):
      state = _state.HostState(
        step=np.zeros((), np.int32),
        params=params,
        opt_state=_state.init_optimizer(spec, params),
        reference=reference,
        device_reference=reference,
        grad_state=_state.init_grad_state(spec),
        stats=self._stage_stats(stats),
        sent_bytes=np.zeros((), np.int64),
        returned_bytes=np.zeros((), np.int64),
      )
    return self.place_state(state)

  @core.declare(state=_host_state)
  def place_state(self, state: _state.HostState) -> _state.HostState:
    """Moves a state, one from a checkpoint say, to the host and the device.

    Args:
      state: state of JAX or NumPy arrays, wherever they are.
    """
    host, device = self._devices()
    return dataclasses.replace(
      state,
      params=jax.device_put(state.params, host),
      opt_state=jax.device_put(state.opt_state, host),
      reference=jax.device_put(state.reference, host),
      device_reference=_state.place_reference(state, device),
      grad_state=jax.device_put(state.grad_state, device),
      stats=jax.device_put(state.stats, device),
    )

  @core.declare(
    state=_host_state,
    batch=_layout.outside_jit,
    run_op=core.function,
    donate=core.boolean,
  )
  def step(
    self,
    state: _state.HostState,
    batch: PyTree,
    level: Any = 0,
    *,
    run_op: Callable[..., Any] = _step.call_directly,
    donate: bool = True,
  ) -> tuple[_state.HostState, Array]:
    """Trains on one batch.

    Args:
      state: state from `init` or the last `step`. Its buffers are donated: go
        on with the state that `step` returns. After an exception, Ctrl-C
        included, `state` is whole. It is that before the step, or that after it
        if all gradients had been computed (`state.step` says which).
      batch: pytree of arrays, sent to the device as it is.
      level: position in `weights` for every group, int[groups], or one int
        for all.
      run_op: hook (name, op, *args) -> op(*args) that all work passes through,
        several times per step, under the names "pack", "send", "unpack",
        "forward", "backward", "return" and "update". Use it to time the ops: a
        hook that waits for what an op returns lets nothing overlap.
      donate: whether the step takes the buffers of `state` for the new state.
        False copies the state first and keeps it, for a notebook whose cells
        run twice.

    Returns:
      The new state and the loss, a scalar on the device.

    Raises:
      TypeError: `level` is not of integers, or a stage returns arrays that are
        not floating-point.
      ValueError: a level is out of range, there is not one for each group, the
        loss is not a scalar, or `state` was donated before.
    """
    if donate and state.is_taken:
      raise ValueError(
        f"`state` must be a state that no step has taken, got that of step "
        f"{int(state.step)}: go on with what that step returned, or with "
        "`place_state(state)` if an exception discarded it. With "
        "`donate=False` a step does not take the state."
      )
    args = {
      "state": dataclasses.replace(
        state, device_reference=_state.own_reference(state), stats=()
      ),
      "state/stats": state.stats,
      "batch": batch,
    }
    core.check_buffers(args, ("state",) if donate else ())
    if not donate:
      state = jax.tree.map(
        lambda a: jnp.copy(a) if isinstance(a, jax.Array) else a, state
      )
    step = _step.Step(self._spec(state.params, level), state, run_op)
    loss = step.run(batch)
    return step.commit(), loss

  @core.declare(params=core.arrays)
  def groups_of(self, params: PyTree) -> controllers.Groups:
    """Returns the groups, in the order of levels, norms and errors.

    Args:
      params: parameters as for `init`.
    """
    return self._make_layout(params).groups

  @core.declare(state=_host_state)
  def norms(self, state: _state.HostState) -> Array:
    """Returns the L2 norm of every group's master weights, float32[groups].

    Args:
      state: state as for `step`; nothing is donated.
    """
    return _group_norms(state.params, self.groups_of(state.params))

  def errors(self, state: _state.HostState, level: Any = 0) -> Array:
    """Returns the relative L2 error of every group's weights on the device.

    Let w be the master weights, and y the weights that the device would compute
    with if the next step were at this level. The error is ||y - w|| / ||w||, 0
    where w is 0. Computed on the host, at about the cost of encoding and
    decoding.

    Args:
      state: state as for `step`; nothing is donated.
      level: position in `weights` for every group, int[groups], or one int
        for all.

    Returns:
      float32[groups].
    """
    norms = self.norms(state)
    step = _step.Step(self._spec(state.params, level), state)
    return _relative_errors(step.squared_errors(), norms)

  @core.declare(
    params=core.arrays, batch=core.arrays, measure_memory=core.function
  )
  def device_bytes(
    self,
    params: PyTree,
    batch: PyTree,
    stats: PyTree = None,
    level: Any = 0,
    *,
    measure_memory: Callable[..., int] = _device_bytes.measure_temp_bytes,
  ) -> int:
    """Returns the most bytes that the device holds in a step, before any runs.

    Counts weights, payloads, inputs of stages, residuals, gradients on their
    way to the host, and temporary buffers of the programs, each compiled once.
    Two programs that follow each other count as if they ran at once, because
    the second is dispatched before the first is done. The host holds `params`
    and the optimizer state.

    Args:
      params: parameters as for `init`, or their shapes.
      batch: batch as for `step`, or its shapes.
      stats: stats as for `init`, or their shapes.
      level: position in `weights` for every group, int[groups], or one int
        for all.
      measure_memory: `measure_memory(fn, *args)` compiles a function for such
        arguments and returns the bytes that it needs besides arguments and
        results. The default compiles for JAX's backend; pass a compiler for
        another device to plan without that device.

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
    spec = self._spec(params, level)
    grad_state = jax.eval_shape(lambda: _state.init_grad_state(spec))
    data = jax.tree.map(core.abstract_like, (self._stage_stats(stats), batch))
    shapes = _device_bytes.StepShapes(spec, grad_state, *data)
    return _device_bytes.peak_device_bytes(shapes, measure_memory)

  @core.declare(params=core.typed_arrays)
  def plain_bytes(self, params: PyTree) -> int:
    """Returns the bytes of the parameters, which float32 moves each way.

    Args:
      params: parameters as for `init`.
    """
    return wire.payload_bytes(identity(), params)

  def _spec(self, params: PyTree, level: Any = 0) -> _programs.ModelSpec:
    """Returns the options for some parameters, each group at its level."""
    is_single = callable(self.stages)
    stages: Any = [("loss", self.stages)] if is_single else self.stages
    functions = tuple(
      _programs.StageFunction(fn, not is_single, self.stateful)
      for _, fn in stages
    )
    layout, (host, device) = self._make_layout(params), self._devices()
    is_one = isinstance(self.weights, Codec)
    level_codecs: Any = (self.weights,) if is_one else self.weights
    return _programs.ModelSpec(
      layout=layout,
      functions=functions,
      names=tuple(name for name, _ in stages),
      tx=self.tx,
      level_codecs=level_codecs,
      levels=_layout.resolve_levels(level, layout.groups, len(level_codecs)),
      grad_codecs=layout.leaf_codecs(self.grads),
      send_difference=self.send_difference,
      stream_weights=self.stream_weights,
      is_per_stage=self.update == "per_stage",
      seed=self.seed,
      device_dtype=self.device_dtype,
      host=host,
      device=device,
    )

  def _devices(self) -> tuple[jax.Device, jax.Device]:
    """Returns the device that holds weights, and the one that computes."""
    host = jax.local_devices(backend="cpu")[0]
    return host, self.device or jax.local_devices()[0]

  def _stage_names(self) -> tuple[str, ...] | None:
    """Returns the stages' names; None for a single function."""
    if callable(self.stages):
      return None
    return tuple(name for name, _ in self.stages)

  def _make_layout(self, params: PyTree) -> _layout.Layout:
    """Returns the layout of some parameters, the same one for equal shapes."""
    names = self._stage_names()
    return _layout.make_layout(
      params, names, self.groups, self.min_leaf_size, self.device_dtype
    )

  def _stage_stats(self, stats: PyTree) -> tuple[PyTree, ...]:
    """Returns the stats of every stage, `()` for stages without."""
    if stats is not None and not self.stateful:
      raise ValueError("`stats` must be None unless `stateful`, got some.")
    names = self._stage_names()
    if names is None:
      return (() if stats is None else stats,)
    by_name = {} if stats is None else stats
    if not isinstance(by_name, Mapping) or not set(by_name) <= set(names):
      given = sorted(by_name) if isinstance(by_name, Mapping) else type(by_name)
      raise ValueError(
        f"`stats` must be a mapping of stages among {sorted(names)}, "
        f"got {given!r}."
      )
    return tuple(by_name.get(name, ()) for name in names)


_group_norms = functools.partial(jax.jit, static_argnums=1)(
  controllers.group_norms
)


@jax.jit
def _relative_errors(squares: Sequence[Array], norms: Array) -> Array:
  """Returns the norms of errors relative to those of the weights, or 0."""
  ratio = jnp.sqrt(jnp.stack(squares)) / norms
  return jnp.where(norms > 0, ratio, 0.0)
