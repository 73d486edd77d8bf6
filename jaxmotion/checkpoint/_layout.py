"""Descriptions of optimizer states, to be saved beside them.

The arrays of a state do not say which codec encoded them or how many workers
shared them. A layout does. It is plain data, so that a checkpoint can hold it
as JSON.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import optax
from jax.sharding import AbstractMesh, Mesh

from jaxmotion.codecs import Codec, from_config
from jaxmotion.core import (
  AxisName,
  axis_names,
  check_mapping,
  named_leaves,
)
from jaxmotion.transforms.extend import ExchangeOptions, trace_state

_VERSION = 1


class ExchangeLayout(NamedTuple):
  """Description of the state of one exchange.

  Attributes:
    codecs: codec of the exchange, or one for each level.
    op: "mean" or "sum".
    method: "gather", "two_phase" or None.
    axis_name: the workers' axes, or those of the hosts.
    local_axis: the axes of the devices of one host, or None.
    leaves: path, shape and dtype of every array that is exchanged.
  """

  codecs: tuple[Codec, ...]
  op: str
  method: str | None
  axis_name: tuple[str, ...]
  local_axis: tuple[str, ...] | None
  leaves: tuple[tuple[str, tuple[int, ...], str], ...]


class Layout(NamedTuple):
  """Description of an optimizer state: its workers and its exchanges.

  Attributes:
    workers: name and length of every axis of workers.
    exchanges: one entry for each exchange, in the order of their states.
  """

  workers: tuple[tuple[str, int], ...]
  exchanges: tuple[ExchangeLayout, ...]

  def to_dict(self) -> dict[str, Any]:
    """Returns the layout as plain data, which JSON can hold."""
    return {
      "version": _VERSION,
      "workers": dict(self.workers),
      "exchanges": [
        exchange._asdict()
        | {"codecs": [codec.config() for codec in exchange.codecs]}
        for exchange in self.exchanges
      ],
    }

  @classmethod
  def from_dict(cls, data: Mapping[str, Any]) -> "Layout":
    """Returns the layout of what `to_dict` returned.

    Args:
      data: the plain data, also after a way through JSON.

    Raises:
      ValueError: an entry is missing, or of another version.
    """
    check_mapping("data", data, "plain data")
    if data.get("version") != _VERSION:
      raise ValueError(
        f"`data` must be a layout of version {_VERSION}, got version "
        f"{data.get('version')!r}."
      )
    try:
      return cls(
        tuple((str(k), int(v)) for k, v in data["workers"].items()),
        tuple(_read_exchange(entry) for entry in data["exchanges"]),
      )
    except (AttributeError, KeyError, TypeError) as error:
      raise ValueError(
        "`data` must be what `Layout.to_dict` returned, got one in which "
        f"{type(error).__name__}: {error}."
      ) from error


def layout_mesh(layout: Layout) -> AbstractMesh:
  """Returns a mesh of a layout's workers, without devices."""
  names, lengths = zip(*layout.workers, strict=True)
  return AbstractMesh(lengths, names)


def count_workers(layout: Layout, axes: tuple[str, ...]) -> int:
  """Returns the number of workers along some axes."""
  lengths = dict(layout.workers)
  return math.prod(lengths[name] for name in axes)


def describe_state(
  tx: optax.GradientTransformation,
  params: Any,
  mesh: Mesh | AbstractMesh,
  *,
  axis_name: AxisName = "data",
) -> Layout:
  """Describes the state that a chain has for these parameters and workers.

  Save the description beside the state: `resize` needs it to continue with
  another number of workers or another codec.

  Args:
    tx: optax chain.
    params: pytree of parameters, or of their ShapeDtypeStructs.
    mesh: mesh of the workers. A `jax.sharding.AbstractMesh` will do.
    axis_name: the axis (or axes) of the workers.

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
  traced = trace_state(tx, params, mesh, axis_name)
  return make_layout(mesh, axis_name, traced.exchanges)


def make_layout(
  mesh: Mesh | AbstractMesh,
  axis_name: AxisName,
  exchanges: list[ExchangeOptions],
) -> Layout:
  """Returns the layout of exchanges on a mesh."""
  workers = tuple(
    (name, mesh.shape[name]) for name in map(str, axis_names(axis_name))
  )
  return Layout(workers, tuple(map(_describe_exchange, exchanges)))


def _describe_exchange(options: ExchangeOptions) -> ExchangeLayout:
  codec, local_axis = options.codec, options.local_axis
  return ExchangeLayout(
    (codec,) if isinstance(codec, Codec) else codec,
    options.op,
    options.method,
    tuple(map(str, axis_names(options.axis_name))),
    None if local_axis is None else tuple(map(str, axis_names(local_axis))),
    tuple(
      (path, tuple(leaf.shape), str(leaf.dtype))
      for path, leaf in named_leaves(options.params)
    ),
  )


def _read_exchange(data: Mapping[str, Any]) -> ExchangeLayout:
  local_axis = data["local_axis"]
  return ExchangeLayout(
    tuple(map(from_config, data["codecs"])),
    data["op"],
    data["method"],
    tuple(data["axis_name"]),
    None if local_axis is None else tuple(local_axis),
    tuple((path, tuple(shape), dtype) for path, shape, dtype in data["leaves"]),
  )
