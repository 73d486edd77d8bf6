"""Gradient exchange between workers as an optax transformation."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmotion import codecs, core, hosts
from jaxmotion.collectives import extend
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms import _global_view, _model_axes, _states
from jaxmotion.transforms._model_axes import ModelAxes
from jaxmotion.transforms._states import ExchangeState


@core.declare(
  seed=core.seed,
  start=core.integer(0, 2**31 - 1),
  op=core.choice(("mean", "sum")),
  method=core.choice((None, "gather", "two_phase")),
  nonfinite=core.choice(extend.NONFINITE_POLICIES),
  local_codec=_states.any_codec,
  schedule=core.optional(core.function),
)
def exchange(
  axis_name: AxisName,
  codec: codecs.Codec | Sequence[codecs.Codec] | None = None,
  *,
  op: str = "mean",
  method: str | None = None,
  nonfinite: str = "propagate",
  seed: int = 0,
  local_codec: codecs.Codec | None = None,
  start: int = 0,
  schedule: Callable[[Array], Array] | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces each worker's gradients by their mean, through a codec.

  First in a chain, it makes an optimizer data-parallel:

  .. math::
    g \leftarrow \frac{1}{N} \sum_{r} decode(encode(g_r))

  Use it inside `shard_map` or `pmap` with the axis bound. In a test without
  devices, `jax.vmap(..., axis_name=...)` binds one too. Take gradients that are
  still each worker's own: see `local_value_and_grad`. Wrap what comes before it
  and has state in `per_worker`. Put it inside `optax.partition` and
  `optax.masked`, where frozen leaves then send nothing, but outside of
  `optax.MultiSteps` and `optax.apply_if_finite`, which run it at some steps.

  Args:
    axis_name: the workers' axis, or a tuple of axes. With `HostAxes` devices of
      a host exchange first, at full precision. Each then sends its shard of the
      host's gradient to other hosts through the codec; see
      `collectives.all_reduce`. Give the same `HostAxes` to `make_train_step`,
      `state_specs` and `skip_nonfinite`.
    codec: codec of the payloads; None is `codecs.identity()`, which is
      `lax.pmean`. A sequence has one codec for each level: each update then
      takes `level=`, an int32[] equal on all workers, and sends only that
      codec's payloads. See also `schedule`.
    op: "mean" or "sum" over workers.
    method: "gather" or "two_phase"; None chooses by the number of workers. A
      codec of rounds, such as `low_rank`, has messages of its own.
    nonfinite: policy for gradients, and weights, that are not finite on some
      worker. "propagate": the element reaches every worker, unless its codec
      does not send it, and a weight makes all elements NaN. "skip": all workers
      agree to emit zeros and to keep their error memory as it was; see also
      `skip_nonfinite`. "zero": the element or weight is replaced by zero.
    seed: seed of stochastic rounding and sampling, in [0, 2^32). With the step,
      the leaf's path and the worker it determines every random bit.
    local_codec: codec within a host; None is full precision.
    start: number of updates that exchange at full precision first, and leave
      the codec's state as it is. Early gradients change fast, so that what an
      error memory keeps of them is soon out of date.
    schedule: level of each update, for a sequence of codecs: from the number of
      updates so far, int32[], to int32[]. `update` then takes no `level=`.

  Returns:
    A transformation whose `update` also takes `weight=`, this worker's scalar
    weight in the mean, and `level=` for a sequence of codecs. By `sending=`
    `make_train_step` tells it how the step sends; a wrapper of your own hands
    on all of these. If the codec has state, `init` has to run inside
    `shard_map` or `pmap`; `make_train_step` does so.

  Raises:
    TypeError: an argument of another type, such as a `codec` that is none.
    ValueError: a `seed` outside [0, 2^32); an unknown `op`, `method` or
      `nonfinite`; a `local_codec` without hosts. `update` raises it for a
      gradient that JAX has summed already, in a `shard_map` that checks types.

  Example:
    >>> import optax
    >>> from jaxmotion import codecs
    >>> tx = optax.chain(
    ...   exchange("data", codecs.feedback(codecs.uniform(bits=4))),
    ...   optax.adamw(3e-4),
    ... )
  """
  workers = core.worker_axes("axis_name", axis_name)
  extend.check_local_codec(axis_name, local_codec)
  codec = codecs.identity() if codec is None else codec
  if schedule is not None and isinstance(codec, codecs.Codec):
    raise ValueError(
      "`schedule` must be None for one codec, got one: give `codec` a list "
      "with one codec for each level."
    )
  if not isinstance(codec, codecs.Codec):
    extend.check_codecs("codec", codec)
    codec = tuple(codec)
  options = _states.ExchangeOptions(
    axis_name=core.comparable_axes(axis_name), codec=codec, op=op, method=method
  )
  own = _Exchange(
    axis_name, workers, options, nonfinite, seed, local_codec, start
  )
  init_fn, update_state = _model_axes.map_exchange(own, options, options.codecs)

  @core.declare(updates=core.typed_arrays, params=core.arrays)
  def update_fn(
    updates: PyTree,
    state: ExchangeState,
    params: PyTree | None = None,
    *,
    weight: Any = None,
    level: Any = None,
    sending: hosts.Sending | None = None,
    **extra_args: Any,
  ) -> tuple[PyTree, ExchangeState]:
    """Returns the mean of gradients, and the state after this update."""
    _states.check_options(state, ExchangeState, options)
    if schedule is not None and level is not None:
      raise ValueError(
        "`level` must not be given to `update` of an exchange that has a "
        f"schedule of it, got {level!r}."
      )
    level = level if schedule is None else schedule(state.count)
    extend.check_level_given(level, codec)
    args = {"weight": weight, "level": level, "sending": sending}
    return update_state(updates, state, None, args)

  tx = optax.GradientTransformationExtraArgs(init_fn, update_fn)
  return _global_view.run_anywhere(tx, workers)


class _Exchange(NamedTuple):
  """Arguments of one `exchange`, and what a device does with its shards."""

  axis_name: AxisName
  workers: AxisName  # The same axes, as functions of JAX take them.
  options: _states.ExchangeOptions
  nonfinite: str
  seed: int
  local_codec: codecs.Codec | None
  start: int

  def init(self, params: PyTree, model: ModelAxes) -> ExchangeState:
    """Returns the state of one device's shards."""
    states = extend.init_tree(
      params, self.axis_name, self.options.codec, self.options.method
    )
    return ExchangeState(*_states.make_counts(), core.pack_worker(states))

  def update(
    self,
    updates: PyTree,
    state: ExchangeState,
    params: None,
    args: dict[str, Any],
    model: ModelAxes,
  ) -> tuple[PyTree, ExchangeState]:
    """Returns the workers' mean of one device's gradients, and its state."""
    codec, sending = self.options.codec, args["sending"]
    check_local(updates, self.workers)
    # All shards of a model are skipped, or none.
    axes = (*core.axis_names(self.workers), *model.names)
    (grads, weight), ok = extend.apply_nonfinite_policy(
      self.nonfinite, (updates, args["weight"]), axes
    )
    if ok is not None and (self.start or not isinstance(codec, codecs.Codec)):
      # XLA:CPU would run the agreement's sum beside sums in a branch, and may
      # end in a crash: what is sent waits for it.
      grads = jax.tree.map(lambda a: jnp.where(ok, a, 0), grads)
    old = core.unpack_worker(state.codec_state)
    may_draw = self.local_codec is not None or any(
      one.is_tree or one.needs_key for one in self.options.codecs
    )
    key = None
    if may_draw:
      key = core.make_key(self.seed, core.worker_index(self.workers))
      key = key.fold(state.count)
    reduce = functools.partial(
      extend.reduce_tree,
      axis_name=self.axis_name,
      op=self.options.op,
      method=self.options.method,
      key=key,
      weight=weight,
      local_codec=self.local_codec,
      sending=sending,
    )
    coded = dict(codec=codec, level=args["level"])

    # Both branches return values of one type.
    def reduce_uncoded(grads: PyTree, old: PyTree) -> tuple[PyTree, PyTree]:
      mean, _ = reduce(grads, codec=codecs.identity(), state=None)
      return core.to_varying_like(mean, grads, self.workers), old

    def reduce_coded(grads: PyTree, old: PyTree) -> tuple[PyTree, PyTree]:
      mean, new = reduce(grads, state=old, **coded)
      return core.to_varying_like(mean, grads, self.workers), new

    if self.start:
      # The branch is around the collective: only one of both sends. The count
      # is equal on all workers.
      is_early = sending.order_branch(state.count) < self.start
      mean, new = lax.cond(is_early, reduce_uncoded, reduce_coded, grads, old)
    else:
      mean, new = reduce(grads, state=old, **coded)
    mean, new = extend.keep_update(ok, mean, new, old)
    return mean, ExchangeState(
      *_states.count_update(state, ok), core.pack_worker(new)
    )


def check_local(updates: PyTree, workers: AxisName) -> None:
  """Raises if gradients are summed already: equal on all workers by type."""
  # JAX has summed such a gradient already. `pmap` and maps with
  # `check_vma=False` give no types, so nothing is known there.
  if not core.is_varying(core.worker_index(workers), workers):
    return
  for path, leaf in core.named_leaves(updates):
    if equal := sorted(set(core.axis_names(workers)) - core.varying_axes(leaf)):
      raise ValueError(
        f"`updates/{path}` must be a worker's own gradient, got one that is"
        f" equal on all workers of {', '.join(map(repr, equal))}: JAX has"
        " summed it at full precision, or another exchange has averaged it."
        " Take gradients by `jaxmotion.local_value_and_grad` instead of"
        " `jax.grad`, or leave the map away and take them by"
        " `jaxmotion.value_and_grad`; put one exchange in a chain."
      )
