"""State of exchanges, and what made each state inside a chain."""

import contextvars
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmotion import codecs, core
from jaxmotion.core import Array, AxisName, PyTree


class ExchangeState(NamedTuple):
  """State of the `exchange` transformation.

  Attributes:
    count: int32[], updates so far.
    skipped: int32[], updates that were skipped for a non-finite element.
    codec_state: state of the codec (error memory), each worker's own.

  Example:
    >>> from jaxmotion import codecs, transforms
    >>> tx = transforms.exchange("data", codecs.feedback(codecs.sign()))
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> state = transforms.init_state(tx, {"w": jnp.zeros((2, 8))}, mesh)
    >>> int(state.count), int(state.skipped)
    (0, 0)
    >>> {a.shape[0] for a in jax.tree.leaves(state.codec_state)}  # workers
    {1}
  """

  count: Array  # type: ignore[assignment]
  skipped: Array
  codec_state: core.PerWorker


class DelayedState(NamedTuple):
  """Optimizer state of a step that applies gradients one step late.

  Attributes:
    count: int32[], steps so far.
    inner: state of the optax chain.
    pending: (gradients, weight) of the last step, each worker's own, which the
      next step exchanges and applies. Before the first step they are zeros.
  """

  count: Array  # type: ignore[assignment]
  inner: PyTree
  pending: core.PerWorker


class ExchangeOptions(NamedTuple):
  """Arguments of one `exchange`, and the tree that it is for.

  Attributes:
    axis_name: the workers' axis, or that of the hosts.
    codec: the codec, or a tuple with one for each level.
    op: "mean" or "sum".
    method: "gather", "two_phase" or None.
    local_axis: the axis of the devices of one host, or None.
    params: shapes of what is exchanged.
    specs: how it is sharded over axes of the model, or None.
  """

  axis_name: AxisName
  codec: codecs.Codec | tuple[codecs.Codec, ...]
  op: str
  method: str | None
  local_axis: AxisName | None
  params: PyTree
  specs: PyTree | None


class ShardedOptions(NamedTuple):
  """Arguments of one `sharded`, and the tree that it is for.

  Attributes:
    axis_name: the workers' axis, or that of the hosts.
    tx: the transformation inside.
    gradient_codec: codec of the gradients' parts.
    weight_codec: codec of the differences, or None.
    local_axis: the axis of the devices of one host, or None.
    params: shapes of the parameters.
    specs: how they are sharded over axes of the model, or None.
  """

  axis_name: AxisName
  tx: optax.GradientTransformation
  gradient_codec: codecs.Codec
  weight_codec: codecs.Codec | None
  local_axis: AxisName | None
  params: PyTree
  specs: PyTree | None


Options = ExchangeOptions | ShardedOptions

# Exchanges that were initialized, with their states, while a trace listens.
initialized_exchanges: contextvars.ContextVar[
  list[tuple[Any, Options]] | None
] = contextvars.ContextVar("initialized_exchanges", default=None)


def note_exchange(state: Any, options: Options) -> None:
  """Tells `trace_state` which exchange made a state."""
  found = initialized_exchanges.get()
  if found is not None:
    shapes = jax.tree.map(core.shape_dtype, options.params)
    found.append((state, options._replace(params=shapes)))


def make_counts() -> tuple[Array, Array]:
  """Makes the counts of a fresh state: of updates, and of skipped ones."""
  # They are two arrays: a step that donates the state may not donate one twice.
  return jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)


def count_update(state: Any, ok: Array | None) -> tuple[Array, Array]:
  """Returns the counts of a state after one more update."""
  # `ok`: bool[], whether the update was made; None if none is ever skipped.
  skipped = state.skipped
  if ok is not None:
    skipped = skipped + (1 - ok.astype(jnp.int32))
  return optax.safe_increment(state.count), skipped


def check_counts(state: Any, kind: type) -> None:
  """Raises unless a state is of a class, and its counts are scalars."""
  core.check_instance("state", state, kind, "what `init` returned")
  for name in ("count", "skipped"):
    if jnp.shape(getattr(state, name)):
      raise ValueError(
        f"`state` must have a scalar `{name}`, got shape "
        f"{jnp.shape(getattr(state, name))}."
      )
