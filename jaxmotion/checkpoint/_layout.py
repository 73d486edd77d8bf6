"""Descriptions of optimizer states, to be saved beside them.

The arrays of a state do not say which codec encoded them or how many workers
shared them. A layout does. It is plain data, so that a checkpoint can hold it
as JSON.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxmotion import core
from jaxmotion.codecs import Codec, from_config
from jaxmotion.core import AxisName, PyTree
from jaxmotion.transforms.extend import (
  Options,
  ShardedOptions,
  expand_specs,
  trace_state,
)

_VERSION = 2

Leaves = tuple[tuple[str, tuple[int, ...], str], ...]
Trained: TypeAlias = optax.GradientTransformation | Callable[..., Any]
Spec = tuple[tuple[str, ...], ...]


class ExchangeLayout(NamedTuple):
  """Description of the state of one exchange.

  Attributes:
    codecs: codec of the exchange, or one for each level.
    op: "mean" or "sum".
    method: "gather", "two_phase" or None.
    axis_name: the workers' axes, or those of the hosts.
    local_axis: the axes of the devices of one host, or None.
    leaves: path, shape and dtype of every array that is exchanged.
    specs: for each leaf the axes of the model that shard each dimension; empty
      if there are no such axes.

  Example:
    >>> from jaxmotion import checkpoint, codecs, transforms
    >>> codec = codecs.feedback(codecs.sign())
    >>> tx = transforms.exchange("data", codec)
    >>> mesh = jax.sharding.AbstractMesh((4,), ("data",))
    >>> (one,) = checkpoint.describe_state(tx, jnp.zeros(8), mesh).exchanges
    >>> one.axis_name, one.op, one.codecs == (codec,)
    (('data',), 'mean', True)
  """

  codecs: tuple[Codec, ...]
  op: str
  method: str | None
  axis_name: tuple[str, ...]
  local_axis: tuple[str, ...] | None
  leaves: Leaves
  specs: tuple[Spec, ...] = ()


class ShardedLayout(NamedTuple):
  """Description of the state of one `sharded`.

  Attributes:
    gradient_codec: codec of the gradients' parts.
    weight_codec: codec of the differences, or None if there is no master.
    axis_name: the workers' axes, or those of the hosts.
    local_axis: the axes of the devices of one host, or None.
    leaves: path, shape and dtype of every parameter.
    specs: as for `ExchangeLayout`.

  Example:
    >>> import optax
    >>> from jaxmotion import checkpoint, transforms
    >>> tx = transforms.sharded("data", optax.adam(1e-3))
    >>> mesh = jax.sharding.AbstractMesh((4,), ("data",))
    >>> (one,) = checkpoint.describe_state(tx, jnp.zeros(8), mesh).exchanges
    >>> one.axis_name, one.leaves
    (('data',), (('', (8,), 'float32'),))
  """

  gradient_codec: Codec
  weight_codec: Codec | None
  axis_name: tuple[str, ...]
  local_axis: tuple[str, ...] | None
  leaves: Leaves
  specs: tuple[Spec, ...] = ()


class Layout(NamedTuple):
  """Description of an optimizer state: its workers and its exchanges.

  Attributes:
    workers: name and length of every axis of workers.
    model: name and length of every axis that shards the model.
    exchanges: one entry for each exchange, in the order of their states.

  Example:
    >>> from jaxmotion import checkpoint, codecs, transforms
    >>> tx = transforms.exchange("data", codecs.feedback(codecs.sign()))
    >>> mesh = jax.sharding.AbstractMesh((4,), ("data",))
    >>> layout = checkpoint.describe_state(tx, jnp.zeros(8), mesh)
    >>> layout.workers
    (('data', 4),)
    >>> Layout.from_dict(layout.to_dict()) == layout  # A file may hold it.
    True
  """

  workers: tuple[tuple[str, int], ...]
  model: tuple[tuple[str, int], ...]
  exchanges: tuple[ExchangeLayout | ShardedLayout, ...]

  def to_dict(self) -> dict[str, Any]:
    """Returns the layout as plain data, which JSON can hold."""
    return {
      "version": _VERSION,
      "workers": dict(self.workers),
      "model": dict(self.model),
      "exchanges": list(map(_write_entry, self.exchanges)),
    }

  @classmethod
  def from_dict(cls, data: Mapping[str, Any]) -> "Layout":
    """Returns the layout of what `to_dict` returned.

    Args:
      data: the plain data, also after a way through JSON.

    Raises:
      ValueError: an entry is missing, or of another version.
    """
    core.check_mapping("data", data, "plain data")
    if data.get("version") != _VERSION:
      raise ValueError(
        f"`data` must be a layout of version {_VERSION}, got version "
        f"{data.get('version')!r}."
      )
    try:
      return cls(
        tuple((str(k), int(v)) for k, v in data["workers"].items()),
        tuple((str(k), int(v)) for k, v in data["model"].items()),
        tuple(map(_read_entry, data["exchanges"])),
      )
    except (AttributeError, KeyError, TypeError) as error:
      raise ValueError(
        "`data` must be what `Layout.to_dict` returned, got one in which "
        f"{type(error).__name__}: {error}."
      ) from error


def layout_mesh(
  layout: Layout, workers: tuple[tuple[str, int], ...], mesh: Any
) -> AbstractMesh:
  """Returns a mesh without devices that has a layout's axes of the model."""
  names, lengths = zip(*workers, *layout.model, strict=True)
  today = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
  models = [name for name, _ in layout.model]
  kinds = [today[n] if n in models else AxisType.Auto for n in names]
  return AbstractMesh(lengths, names, axis_types=tuple(kinds))


def count_workers(layout: Layout, axes: tuple[str, ...]) -> int:
  """Returns the number of workers along some axes."""
  lengths = dict(layout.workers)
  return math.prod(lengths[name] for name in axes)


def describe_state(
  tx: Trained,
  params: Any,
  mesh: Mesh | AbstractMesh,
  *,
  axis_name: AxisName = "data",
  specs: PyTree | None = None,
) -> Layout:
  """Describes the state that a chain has for these parameters and workers.

  Save the description beside the state: `resize` needs it to continue with
  another number of workers or another codec.

  Args:
    tx: optax chain, or the `init` that `data_parallel`, `fully_sharded` or
      `local_updates` returned.
    params: pytree of parameters, or of their ShapeDtypeStructs.
    mesh: mesh of the workers. A `jax.sharding.AbstractMesh` will do.
    axis_name: the axis (or axes) of the workers.
    specs: how parameters are sharded over other axes, as `data_parallel` takes
      it; None: they are not.

  Returns:
    The layout.

  Raises:
    TypeError: an argument of another type.
    ValueError: the mesh has no such axis.

  Example:
    >>> import jax.numpy as jnp
    >>> from jax.sharding import AbstractMesh
    >>> from jaxmotion import checkpoint, codecs, transforms
    >>> tx = optax.chain(
    ...   transforms.exchange("data", codecs.feedback(codecs.sign())),
    ...   optax.sgd(0.1),
    ... )
    >>> mesh = AbstractMesh((4,), ("data",))
    >>> layout = checkpoint.describe_state(tx, {"w": jnp.zeros(3)}, mesh)
    >>> layout.workers, layout.exchanges[0].codecs[0].codec
    ((('data', 4),), sign(block=1024))
    >>> checkpoint.Layout.from_dict(layout.to_dict()) == layout
    True
  """
  traced = trace_state(tx, params, mesh, axis_name, specs)
  return make_layout(mesh, axis_name, specs, traced.exchanges)


def make_layout(
  mesh: Mesh | AbstractMesh,
  axis_name: AxisName,
  specs: PyTree | None,
  exchanges: list[Options],
) -> Layout:
  """Returns the layout of exchanges on a mesh."""
  workers = tuple(
    (name, mesh.shape[name]) for name in map(str, core.axis_names(axis_name))
  )
  names = [name for name, _ in workers]
  model = tuple(
    (str(name), size)
    for name, size in mesh.shape.items()
    if specs is not None and name not in names and size > 1
  )

  def describe_entry(options: Options) -> ExchangeLayout | ShardedLayout:
    leaves = tuple(
      (path, tuple(leaf.shape), str(leaf.dtype))
      for path, leaf in core.named_leaves(options.params)
    )
    divided = _describe_specs(options, specs, dict(model))
    axes = _strings(options.axis_name)
    local = None
    if options.local_axis is not None:
      local = _strings(options.local_axis)
    if isinstance(options, ShardedOptions):
      codecs = options.gradient_codec, options.weight_codec
      return ShardedLayout(*codecs, axes, local, leaves, divided)
    codec = options.codec
    return ExchangeLayout(
      (codec,) if isinstance(codec, Codec) else codec,
      options.op,
      options.method,
      axes,
      local,
      leaves,
      divided,
    )

  return Layout(workers, model, tuple(map(describe_entry, exchanges)))


def _strings(axis_name: AxisName) -> tuple[str, ...]:
  return tuple(map(str, core.axis_names(axis_name)))


def _describe_specs(
  options: Options, specs: PyTree, sizes: dict[Any, int]
) -> tuple[Spec, ...]:
  """Returns the axes of the model that shard each dimension of each leaf."""
  if not sizes:
    return ()
  chosen = specs if options.specs is None else options.specs
  full = expand_specs(chosen, options.params, sizes)
  return tuple(
    tuple(
      tuple(n for n in sizes if n in core.spec_axes(entry))
      for entry in (*spec, *[None] * (leaf.ndim - len(spec)))
    )
    for spec, leaf in zip(
      jax.tree.leaves(full), jax.tree.leaves(options.params), strict=True
    )
  )


def _write_entry(entry: ExchangeLayout | ShardedLayout) -> dict[str, Any]:
  data = entry._asdict()
  if isinstance(entry, ExchangeLayout):
    return data | {"codecs": [codec.config() for codec in entry.codecs]}
  weight = entry.weight_codec
  return data | {
    "gradient_codec": entry.gradient_codec.config(),
    "weight_codec": None if weight is None else weight.config(),
  }


def _read_entry(data: Mapping[str, Any]) -> ExchangeLayout | ShardedLayout:
  local = data["local_axis"]
  shared = (
    tuple(data["axis_name"]),
    None if local is None else tuple(local),
    tuple((path, tuple(shape), dtype) for path, shape, dtype in data["leaves"]),
    tuple(tuple(map(tuple, spec)) for spec in data["specs"]),
  )
  if "gradient_codec" in data:
    weight = data["weight_codec"]
    return ShardedLayout(
      from_config(data["gradient_codec"]),
      None if weight is None else from_config(weight),
      *shared,
    )
  return ExchangeLayout(
    tuple(map(from_config, data["codecs"])),
    data["op"],
    data["method"],
    *shared,
  )
