"""Gradient exchange between workers as an optax transformation."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmotion import collectives, core
from jaxmotion.codecs import Codec, identity
from jaxmotion.codecs.extend import check_codec
from jaxmotion.collectives.extend import (
  NONFINITE_POLICIES,
  all_axes,
  apply_nonfinite_policy,
  check_codecs,
  check_level_given,
  check_weight,
  keep_update,
  order_branch,
)
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms import _exchange_state, _model_axes


def exchange(
  axis_name: AxisName,
  codec: Codec | Sequence[Codec] | None = None,
  *,
  op: str = "mean",
  method: str | None = None,
  nonfinite: str = "propagate",
  seed: int = 0,
  local_axis: AxisName | None = None,
  local_codec: Codec | None = None,
  specs: PyTree | None = None,
  start: int = 0,
  level: Callable[[Array], Array] | None = None,
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
    axis_name: the workers' axis, or a tuple of axes.
    codec: codec of the payloads; None is `codecs.identity()`, which is
      `lax.pmean`. A sequence has one codec for each level: each update then
      takes `level=`, an int32[] equal on all workers, and sends only that
      codec's payloads. See also `level`.
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
    local_axis: the axis of the devices of one host, if `axis_name` is that of
      the hosts. Devices of a host then exchange first, at full precision. Each
      sends its shard of the host's gradient to other hosts through the codec;
      see `collectives.all_reduce_hierarchical`. The mean is over the workers of
      both axes: give `data_parallel`, `state_specs` and `skip_nonfinite` both,
      `("host", "device")`.
    local_codec: codec within a host; None is full precision.
    specs: how parameters are sharded over axes of the mesh that are not the
      workers' (tensor parallelism). A tree of PartitionSpecs like the
      parameters, or a prefix of it. Give it for a map over the workers' axis
      only, such as that of `data_parallel(..., specs=specs)`. Each device then
      encodes, sends and remembers its own shard. None: the types of arrays tell
      it, if these axes are explicit; there are no such axes, or the map is over
      them too.
    start: number of updates that exchange at full precision first, and leave
      the codec's state as it is. Early gradients change fast, so that what an
      error memory keeps of them is soon out of date.
    level: schedule of the level, for a sequence of codecs: from the number of
      updates so far, int32[], to int32[]. `update` then takes no `level=`.

  Returns:
    A transformation whose `update` also takes `weight=`, this worker's scalar
    weight in the mean, and `level=` for a sequence of codecs. If the codec has
    state, `init` has to run inside `shard_map` or `pmap`; `data_parallel` does
    so.

  Raises:
    TypeError: an argument of another type, such as a `codec` that is none.
    ValueError: a `seed` outside [0, 2^32); an unknown `op`, `method` or
      `nonfinite`; an axis in both `axis_name` and `local_axis`; a
      `local_codec` without `local_axis`. `update` raises it for a gradient
      that JAX has summed already, in a `shard_map` that checks types.

  Example:
    >>> from jaxmotion import codecs
    >>> tx = optax.chain(
    ...   exchange("data", codecs.feedback(codecs.uniform(bits=4))),
    ...   optax.adamw(3e-4),
    ... )
  """
  core.check_axis_name("axis_name", axis_name)
  if local_axis is not None:
    core.check_axis_name("local_axis", local_axis)
  if local_codec is not None:
    check_codec("local_codec", local_codec, trees=True)
  core.check_int("seed", seed, 0, 2**32 - 1)
  core.check_int("start", start, 0, 2**31 - 1)
  codec = identity() if codec is None else codec
  check_schedule(level, codec)
  if not isinstance(codec, Codec):
    check_codecs("codec", codec)
    codec = tuple(codec)
  core.check_choice("op", op, ("mean", "sum"))
  core.check_choice("method", method, (None, "gather", "two_phase"))
  core.check_choice("nonfinite", nonfinite, NONFINITE_POLICIES)
  workers = all_axes(axis_name, local_axis, local_codec)
  _model_axes.check_specs(specs, workers)

  def init_shards(
    params: PyTree, model: _model_axes.ModelAxes
  ) -> _exchange_state.ExchangeState:
    del model
    if local_axis is not None:
      states = collectives.all_reduce_hierarchical_init(
        params, axis_name, local_axis, codec, method=method
      )
    elif isinstance(codec, Codec):
      states = collectives.all_reduce_init(
        params, axis_name, codec, method=method
      )
    else:
      states = collectives.all_reduce_adaptive_init(
        params, axis_name, codec, method=method
      )
    return _exchange_state.ExchangeState(
      *_exchange_state.make_counts(), core.pack_worker(states)
    )

  def update_shards(
    updates: PyTree,
    state: _exchange_state.ExchangeState,
    params: None,
    args: dict[str, Any],
    model: _model_axes.ModelAxes,
  ) -> tuple[PyTree, _exchange_state.ExchangeState]:
    del params
    level = args["level"]
    check_local(updates, workers)
    # All shards of a model are skipped, or none.
    (x, weight), ok = apply_nonfinite_policy(
      nonfinite,
      (updates, args["weight"]),
      (*core.axis_names(workers), *model.names),
    )
    if ok is not None and (start or not isinstance(codec, Codec)):
      # XLA:CPU would run the agreement's sum beside sums in a branch, and may
      # end in a crash: what is sent waits for it.
      x = jax.tree.map(lambda a: jnp.where(ok, a, 0), x)
    old = core.unpack_worker(state.codec_state)
    key = core.make_key(seed, core.worker_index(workers)).fold(state.count)

    def reduce(
      codec: Codec | tuple[Codec, ...], x: PyTree, old: PyTree | None
    ) -> tuple[PyTree, PyTree]:
      options: dict[str, Any] = dict(
        state=old, key=key, op=op, weight=weight, method=method
      )
      if local_axis is not None:
        if not isinstance(codec, Codec):
          options |= dict(level=level)
        options |= dict(local_codec=local_codec)
        return collectives.all_reduce_hierarchical(
          x, axis_name, local_axis, codec, **options
        )
      if isinstance(codec, Codec):
        return collectives.all_reduce(x, axis_name, codec, **options)
      return collectives.all_reduce_adaptive(
        x, axis_name, codec, level, **options
      )

    def reduce_plainly(x: PyTree, old: PyTree) -> tuple[PyTree, PyTree]:
      return core.to_varying_like(
        reduce(identity(), x, None)[0], x, workers
      ), old

    def reduce_coded(x: PyTree, old: PyTree) -> tuple[PyTree, PyTree]:
      y, new = reduce(codec, x, old)
      return core.to_varying_like(y, x, workers), new

    if start:
      # The branch is around the collective: only one of both sends. The count
      # is equal on all workers.
      y, new = lax.cond(
        order_branch(state.count) < start,
        reduce_plainly,
        reduce_coded,
        x,
        old,
      )
    else:
      y, new = reduce(codec, x, old)
    y, new = keep_update(ok, y, new, old)
    return y, _exchange_state.ExchangeState(
      *_exchange_state.count_update(state, ok), core.pack_worker(new)
    )

  schedule = level
  codecs = (codec,) if isinstance(codec, Codec) else codec
  init_mapped, update_mapped = _model_axes.map_model_axes(
    init_shards, update_shards, specs, workers, codecs
  )

  def init_fn(params: PyTree) -> _exchange_state.ExchangeState:
    core.check_arrays("params", params, numbers=False)
    state = init_mapped(params)
    _exchange_state.note_exchange(
      state,
      _exchange_state.ExchangeOptions(
        axis_name, codec, op, method, local_axis, params, specs
      ),
    )
    return state

  def update_fn(
    updates: PyTree,
    state: _exchange_state.ExchangeState,
    params: PyTree | None = None,
    *,
    weight: Any = None,
    level: Any = None,
    **extra_args: Any,
  ) -> tuple[PyTree, _exchange_state.ExchangeState]:
    del extra_args
    core.check_arrays("params", params)
    core.check_arrays("updates", updates, numbers=False)
    _exchange_state.check_counts(state, _exchange_state.ExchangeState)
    check_weight(weight)
    if schedule is not None and level is not None:
      raise ValueError(
        "`level` must not be given to `update` of an exchange that has a "
        f"schedule of it, got {level!r}."
      )
    level = level if schedule is None else schedule(state.count)
    check_level_given(level, codec)
    args = {"weight": weight, "level": level}
    return update_mapped(updates, state, None, args)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def check_schedule(level: Any, codec: Any) -> None:
  """Raises unless a schedule of levels is a function, for several codecs."""
  if level is None:
    return
  core.check_callable("level", level)
  if isinstance(codec, Codec):
    raise ValueError(
      "`level` must be None for one codec, got a schedule: give `codec` a list "
      "with one codec for each level."
    )


def check_local(updates: PyTree, workers: AxisName) -> None:
  """Raises an error if gradients are typed as equal on all workers."""
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
        " `jax.grad`, or run the step by `jaxmotion.parallelize_step`; put one"
        " exchange in a chain."
      )
