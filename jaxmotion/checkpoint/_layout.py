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

from jaxmotion import core, transforms
from jaxmotion.codecs import Codec, from_config
from jaxmotion.core import AxisName, PyTree
from jaxmotion.transforms.extend import (
  Options,
  ShardedOptions,
  drop_single_axes,
  expand_specs,
  trace_state,
)

_VERSION = 3

Leaves = tuple[tuple[str, tuple[int, ...], str], ...]
Trained: TypeAlias = optax.GradientTransformation | Callable[..., Any]
Spec = tuple[tuple[str, ...], ...]


class ExchangeLayout(NamedTuple):
  """Description of the state of one `exchange` or one `sharded`.

  Attributes:
    codecs: codec of the gradients, or one for each level.
    axis_name: the workers' axes, as a tuple or `HostAxes`.
    leaves: path, shape and dtype of every array that is exchanged.
    specs: for each leaf the axes of the model that shard each dimension; empty
      if there are no such axes.
    op: "mean" or "sum".
    method: "gather", "two_phase" or None.
    is_sharded: whether it is `sharded`, whose workers divide the arrays.
    weight_codec: codec of the differences of `sharded`, or None if there is no
      master.

  Example:
    >>> import optax
    >>> from jaxmotion import checkpoint, codecs, transforms
    >>> mesh = jax.sharding.AbstractMesh((4,), ("data",))
    >>> codec = codecs.feedback(codecs.sign())
    >>> tx = transforms.exchange("data", codec)
    >>> (one,) = checkpoint.describe_state(tx, jnp.zeros(8), mesh).exchanges
    >>> one.axis_name, one.op, one.codecs == (codec,)
    (('data',), 'mean', True)
    >>> tx = transforms.sharded("data", optax.adam(1e-3))
    >>> (one,) = checkpoint.describe_state(tx, jnp.zeros(8), mesh).exchanges
    >>> one.is_sharded, one.leaves
    (True, (('', (8,), 'float32'),))
  """

  codecs: tuple[Codec, ...]
  axis_name: tuple[str, ...] | core.HostAxes
  leaves: Leaves
  specs: tuple[Spec, ...] = ()
  op: str = "mean"
  method: str | None = None
  is_sharded: bool = False
  weight_codec: Codec | None = None


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
  exchanges: tuple[ExchangeLayout, ...]

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


def count_workers(layout: Layout, axes: AxisName) -> int:
  """Returns the number of workers along some axes."""
  lengths = dict(layout.workers)
  return math.prod(lengths[name] for name in core.axis_names(axes))


def make_transformation(
  entry: ExchangeLayout, inner: optax.GradientTransformation | None = None
) -> optax.GradientTransformation:
  """Makes the exchange that a layout describes, or `sharded` around `inner`."""
  if entry.is_sharded:
    return transforms.sharded(
      entry.axis_name,
      optax.identity() if inner is None else inner,
      gradient_codec=entry.codecs[0],
      weight_codec=entry.weight_codec,
    )
  codec = entry.codecs[0] if len(entry.codecs) == 1 else entry.codecs
  return transforms.exchange(
    entry.axis_name, codec, op=entry.op, method=entry.method
  )


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
    tx: optax chain, or the `init` that `make_train_step` returned.
    params: pytree of parameters, or of their ShapeDtypeStructs.
    mesh: mesh of the workers. A `jax.sharding.AbstractMesh` will do.
    axis_name: the axis (or axes) of the workers.
    specs: how parameters are sharded over other axes, as `make_train_step`
      takes it; None: they are not.

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
  specs = drop_single_axes(specs, mesh.shape)
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

  def describe_entry(options: Options) -> ExchangeLayout:
    entry = ExchangeLayout(
      (),
      options.axis_name,
      tuple(
        (path, tuple(leaf.shape), str(leaf.dtype))
        for path, leaf in core.named_leaves(options.params)
      ),
      _describe_specs(options, specs, dict(model)),
    )
    if isinstance(options, ShardedOptions):
      return entry._replace(
        codecs=(options.gradient_codec,),
        weight_codec=options.weight_codec,
        is_sharded=True,
      )
    codec = options.codec
    return entry._replace(
      codecs=(codec,) if isinstance(codec, Codec) else codec,
      op=options.op,
      method=options.method,
    )

  return Layout(workers, model, tuple(map(describe_entry, exchanges)))


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


def _write_entry(entry: ExchangeLayout) -> dict[str, Any]:
  weight = entry.weight_codec
  axes, local = map(core.axis_names, core.split_axes(entry.axis_name))
  return entry._asdict() | {
    "axis_name": axes,
    "local_axis": local or None,
    "codecs": [codec.config() for codec in entry.codecs],
    "weight_codec": None if weight is None else weight.config(),
  }


def _read_entry(data: Mapping[str, Any]) -> ExchangeLayout:
  values, weight = dict(data), data["weight_codec"]
  axes, local = tuple(values["axis_name"]), values.pop("local_axis")
  values |= {
    "codecs": tuple(map(from_config, data["codecs"])),
    "axis_name": core.HostAxes(axes, tuple(local)) if local else axes,
    "leaves": tuple((p, tuple(shape), t) for p, shape, t in data["leaves"]),
    "specs": tuple(tuple(map(tuple, spec)) for spec in data["specs"]),
    "weight_codec": None if weight is None else from_config(weight),
  }
  return ExchangeLayout(**values)
