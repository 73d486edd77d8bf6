"""The exchange of gradients as an optax transformation."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from jaxmotion.codecs import Codec, identity
from jaxmotion.collectives import (
  all_reduce,
  all_reduce_adaptive,
  all_reduce_adaptive_init,
  all_reduce_hierarchical,
  all_reduce_hierarchical_init,
  all_reduce_init,
)
from jaxmotion.collectives.extend import (
  NONFINITE_POLICIES,
  apply_nonfinite_policy,
  joint_axes,
)
from jaxmotion.core import (
  Array,
  AxisName,
  PerWorker,
  PyTree,
  check_choice,
  make_key,
  pack_worker,
  unpack_worker,
  worker_index,
)


class ExchangeState(NamedTuple):
  """State of `exchange`.

  Attributes:
    count: int32[], updates so far.
    skipped: int32[], updates that were skipped for a non-finite value.
    codec_state: what the codec remembers, each worker its own.
  """

  count: Array  # type: ignore[assignment]
  skipped: Array
  codec_state: PerWorker


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
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces each worker's gradients by their mean, through a codec.

  First in a chain, it makes an optimiser data-parallel:

  .. math::
    g \leftarrow \frac{1}{N} \sum_{r} decode(encode(g_r))

  Use it inside `shard_map` or `pmap` with the axis bound, and take gradients
  that are still each worker's own: see `local_value_and_grad`. Put it outside
  `optax.MultiSteps`, which would run it every mini-step and drop the result.

  Args:
    axis_name: the workers' axis, or a tuple of axes.
    codec: encodes what travels; None is `codecs.identity()`, which is
      `lax.pmean`. A sequence of codecs is a ladder: each update then takes
      `level=`, an int32[] equal on all workers, and sends only what that codec
      makes.
    op: "mean" or "sum".
    method: "gather" or "two_phase"; None chooses by the number of workers.
    nonfinite: what happens when a worker's gradient is not finite:
      "propagate" (it reaches every worker), "skip" (all workers agree to
      emit zeros and to keep their error memory as it was; see also
      `skip_nonfinite`) or "zero" (it is replaced by zero).
    seed: of stochastic rounding and sampling; with the step, the leaf's path
      and the worker it determines every random bit.
    local_axis: the axis of the devices of one host, where `axis_name` is that
      of the hosts. Devices of a host exchange first, at full precision, and
      each sends its part of the host's gradient to other hosts through the
      codec; see `collectives.all_reduce_hierarchical`. The workers, whose mean it
      is, are those of both axes: give `data_parallel`, `state_specs` and
      `skip_nonfinite` both, `("host", "device")`.
    local_codec: encodes what travels within a host; None is full precision.

  Returns:
    A transformation whose `update` also takes `weight=`, this worker's scalar
    weight in the mean, and `level=` for a ladder. `init` has to run inside
    `shard_map` or `pmap` if the codec has state; `data_parallel` does so.

  Raises:
    TypeError: `codec` is no codec.
    ValueError: an unknown `op`, `method` or `nonfinite`; an axis in both
      `axis_name` and `local_axis`; a `local_codec` without `local_axis`.

  Example:
    >>> from jaxmotion import codecs
    >>> tx = optax.chain(
    ...   exchange("data", codecs.feedback(codecs.topk(density=0.01))),
    ...   optax.adamw(3e-4),
    ... )
  """
  ladder = None if codec is None or isinstance(codec, Codec) else tuple(codec)
  single = codec if isinstance(codec, Codec) else identity()
  for c in (single,) if ladder is None else ladder:
    if not isinstance(c, Codec):
      raise TypeError(f"`codec` must be a codec or codecs, got {c!r}.")
  if ladder == ():
    raise ValueError("`codec` must hold at least one codec, got none.")
  check_choice("op", op, ("mean", "sum"))
  check_choice("method", method, (None, "gather", "two_phase"))
  check_choice("nonfinite", nonfinite, NONFINITE_POLICIES)
  workers = _workers(axis_name, local_axis, local_codec)

  def init_fn(params: PyTree) -> ExchangeState:
    if local_axis is not None:
      memory = all_reduce_hierarchical_init(
        params, axis_name, local_axis, ladder or single, method=method
      )
    elif ladder is None:
      memory = all_reduce_init(params, axis_name, single, method=method)
    else:
      memory = all_reduce_adaptive_init(
        params, axis_name, ladder, method=method
      )
    zero = jnp.zeros((), jnp.int32)
    return ExchangeState(zero, zero, pack_worker(memory))

  def update_fn(
    updates: PyTree,
    state: ExchangeState,
    params: PyTree | None = None,
    *,
    weight: Any = None,
    level: Any = None,
    **extra_args: Any,
  ) -> tuple[PyTree, ExchangeState]:
    del params, extra_args
    key = make_key(seed, worker_index(workers)).fold(state.count)

    def reduce(x: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
      options = dict(key=key, op=op, weight=weight, method=method)
      if local_axis is not None:
        return all_reduce_hierarchical(
          x,
          axis_name,
          local_axis,
          ladder or single,
          state=memory,
          level=level,
          local_codec=local_codec,
          **options,
        )
      if ladder is None:
        return all_reduce(x, axis_name, single, state=memory, **options)
      return all_reduce_adaptive(
        x, axis_name, ladder, level, state=memory, **options
      )

    if (level is None) != (ladder is None):
      raise ValueError(
        "`level` must be given for a ladder of codecs and for nothing else, "
        f"got {level!r} for codec {codec!r}."
      )
    memory = unpack_worker(state.codec_state)
    y, memory, ok = apply_nonfinite_policy(
      nonfinite, workers, reduce, updates, memory
    )
    return y, ExchangeState(
      optax.safe_increment(state.count),
      state.skipped + (1 - ok.astype(jnp.int32)),
      pack_worker(memory),
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _workers(
  axis_name: AxisName, local_axis: AxisName | None, local_codec: Codec | None
) -> AxisName:
  """The axes whose workers take part."""
  if local_axis is None:
    if local_codec is not None:
      raise ValueError(
        "`local_codec` must be None unless `local_axis` is given, got "
        f"{local_codec!r}."
      )
    return axis_name
  return joint_axes(axis_name, local_axis)
