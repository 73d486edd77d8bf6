"""Descriptions of optimizer states, to be saved beside them.

The arrays of a state do not say which codec encoded them or how many workers
shared them. A layout does. It is plain data, so that a checkpoint can hold it
as JSON.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import optax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxmotion import core, transforms
from jaxmotion.codecs import Codec
from jaxmotion.core import AxisName, PyTree
from jaxmotion.transforms import extend

_VERSION = 5
_KINDS = {
  kind.kind: kind for kind in (extend.ExchangeOptions, extend.ShardedOptions)
}

Trained: TypeAlias = optax.GradientTransformation | Callable[..., Any]


class Layout(NamedTuple):
  """Description of an optimizer state: its workers and its exchanges.

  Attributes:
    workers: name and length of every axis of workers.
    model: name and length of every axis that shards the model.
    exchanges: what each exchange is made for, as its state says in `made_for`,
      in the order of their states: its arguments, and as `leaves` path, shape,
      dtype and sharding of every array.

  Example:
    >>> from jaxmotion import checkpoint, codecs, transforms
    >>> tx = transforms.exchange("data", codecs.feedback(codecs.sign()))
    >>> mesh = jax.sharding.AbstractMesh((4,), ("data",))
    >>> layout = checkpoint.describe_state(tx, jnp.zeros(8), mesh)
    >>> layout.workers
    (('data', 4),)
    >>> (one,) = layout.exchanges
    >>> one.axis_name, one.op, one.codec.codec, str(one.leaves[0])
    (('data',), 'mean', sign(block=1024), 'float32[8]')
    >>> Layout.from_dict(layout.to_dict()) == layout  # A file may hold it.
    True
  """

  workers: tuple[tuple[str, int], ...]
  model: tuple[tuple[str, int], ...]
  exchanges: tuple[extend.Options, ...]

  @property
  def sizes(self) -> dict[str, int]:
    """The length of every axis."""
    return dict(self.workers + self.model)

  def to_dict(self) -> dict[str, Any]:
    """Returns the layout as plain data, which JSON can hold."""
    return {
      "version": _VERSION,
      "workers": dict(self.workers),
      "model": dict(self.model),
      "exchanges": list(map(_write_options, self.exchanges)),
    }

  @classmethod
  @core.declare(data=core.mapping("plain data"))
  def from_dict(cls, data: Mapping[str, Any]) -> "Layout":
    """Returns the layout of what `to_dict` returned.

    Args:
      data: the plain data, also after a way through JSON.

    Raises:
      ValueError: an entry is missing, or of another version.
    """
    if data.get("version") != _VERSION:
      raise ValueError(
        f"`data` must be a layout of version {_VERSION}, got version "
        f"{data.get('version')!r}."
      )
    try:
      return cls(
        tuple((str(k), int(v)) for k, v in data["workers"].items()),
        tuple((str(k), int(v)) for k, v in data["model"].items()),
        tuple(map(_read_options, data["exchanges"])),
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
  kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
  kinds |= {name: AxisType.Auto for name, _ in workers}
  return AbstractMesh(lengths, names, axis_types=tuple(kinds[n] for n in names))


def make_transformation(
  options: extend.Options, tx: optax.GradientTransformation | None = None
) -> optax.GradientTransformation:
  """Makes the exchange of some options, or `sharded` around `tx`."""
  if isinstance(options, extend.ShardedOptions):
    return transforms.sharded(
      options.axis_name,
      optax.identity() if tx is None else tx,
      gradient_codec=options.gradient_codec,
      weight_codec=options.weight_codec,
    )
  assert isinstance(options, extend.ExchangeOptions)
  return transforms.exchange(
    options.axis_name, options.codec, op=options.op, method=options.method
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

  Raises:
    TypeError: an argument of another type.
    ValueError: the mesh has no such axis.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion import checkpoint, codecs, transforms
    >>> tx = transforms.exchange("data", codecs.feedback(codecs.sign()))
    >>> mesh = AbstractMesh((4,), ("data",))
    >>> layout = checkpoint.describe_state(tx, {"w": jnp.zeros(3)}, mesh)
    >>> layout.workers, layout.exchanges[0].codecs[0].codec
    ((('data', 4),), sign(block=1024))
  """
  state = extend.trace_state(tx, params, mesh, axis_name, specs)
  return make_layout(state, mesh, axis_name, specs)


def make_layout(
  state: PyTree,
  mesh: Mesh | AbstractMesh,
  axis_name: AxisName,
  specs: PyTree | None,
) -> Layout:
  """Returns the layout of a state on a mesh."""
  names = core.axis_names(axis_name)
  # Without specs, devices along other axes hold the same.
  others = {} if specs is None else mesh.shape
  return Layout(
    tuple((name, mesh.shape[name]) for name in names),
    tuple(
      (n, size) for n, size in others.items() if n not in names and size > 1
    ),
    tuple(
      _drop_functions(node.made_for) for node in extend.find_exchanges(state)
    ),
  )


def _drop_functions(options: extend.Options) -> extend.Options:
  """Returns options as a file would hold them."""
  fields = dataclasses.fields(options)
  unset: dict[str, Any] = {f.name: f.default for f in fields if not f.compare}
  return dataclasses.replace(options, **unset)


def _write_options(options: extend.Options) -> dict[str, Any]:
  """Returns the arguments of an exchange, and its tree, as plain data."""
  return {"kind": options.kind} | {
    field.name: _write_value(getattr(options, field.name))
    for field in dataclasses.fields(options)
    if field.compare
  }


def _write_value(value: Any) -> Any:
  if isinstance(value, Codec):
    return value.config()
  if isinstance(value, core.HostAxes):
    return dataclasses.asdict(value)
  return list(map(_write_value, value)) if isinstance(value, tuple) else value


def _read_options(data: Mapping[str, Any]) -> extend.Options:
  """Returns what `_write_options` wrote, after a way through JSON too."""
  values = {name: _read_value(value) for name, value in data.items()}
  leaves = tuple(extend.ExchangedLeaf(*leaf) for leaf in values.pop("leaves"))
  return _KINDS[values.pop("kind")](leaves=leaves, **values)


def _read_value(value: Any) -> Any:
  if isinstance(value, Mapping):
    if value.keys() == {"hosts", "devices"}:
      return core.HostAxes(**{k: _read_value(v) for k, v in value.items()})
    return Codec.from_config(dict(value))
  is_sequence = isinstance(value, list | tuple)
  return tuple(map(_read_value, value)) if is_sequence else value
