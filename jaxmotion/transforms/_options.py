"""Arguments of exchanges, as their states carry them."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxmotion import core
from jaxmotion.codecs import Codec
from jaxmotion.collectives.extend import StateLayout
from jaxmotion.core import AxisName, PyTree
from jaxmotion.transforms import _model_axes

Init = Callable[[PyTree, PyTree | None], Any]


class ExchangedLeaf(NamedTuple):
  """One array of the tree that an exchange is for.

  Attributes:
    path: place in the tree, such as `a/b/0`.
    spec: axes of the model that shard each dimension, up to the last dimension
      that any axis shards.
  """

  path: str
  shape: tuple[int, ...]
  dtype: str
  spec: tuple[tuple[str, ...], ...] = ()

  def __str__(self) -> str:
    spec = f" sharded {self.partition_spec}" if self.spec else ""
    return f"{self.dtype}{list(self.shape)}{spec}"

  @property
  def like(self) -> jax.ShapeDtypeStruct:
    """The shape and dtype of the array."""
    return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))

  @property
  def partition_spec(self) -> PartitionSpec:
    """The partition spec of the array over axes of the model."""
    return PartitionSpec(*(names or None for names in self.spec))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """Arguments of one exchange, and the tree that it is for.

  Attributes:
    axis_name: the workers' axes, as a tuple or `HostAxes`.
    op: "mean" or "sum" over workers.
    leaves: arrays of the tree, in its order; () before `init`.
    has_specs: whether something said how axes of the model shard the tree.
    treedef: structure of the tree; None for options that a file held.
    init: (parameters, specs) -> state; None for options that a file held.
  """

  kind: ClassVar[str]

  axis_name: tuple[Any, ...] | core.HostAxes
  op: str = "mean"
  leaves: tuple[ExchangedLeaf, ...] = dataclasses.field(default=(), repr=False)
  # Specs that shard nothing are equal to none: `leaves` tell what is sharded.
  has_specs: bool = dataclasses.field(default=False, compare=False, repr=False)
  treedef: Any = dataclasses.field(default=None, compare=False, repr=False)
  # Functions of two runs are never equal.
  init: Init | None = dataclasses.field(default=None, compare=False, repr=False)

  @property
  def codecs(self) -> tuple[Codec, ...]:
    """The codec of the gradients, for each level."""
    raise NotImplementedError

  @property
  def axes(self) -> set[Any]:
    """The axes of the workers and of the model."""
    return set(core.axis_names(self.axis_name)).union(
      *(names for leaf in self.leaves for names in leaf.spec)
    )

  @property
  def params(self) -> PyTree:
    """The shapes and dtypes of the tree."""
    return self.treedef.unflatten([leaf.like for leaf in self.leaves])

  @property
  def specs(self) -> PyTree | None:
    """The partition specs of the tree over axes of the model, or None."""
    if not self.has_specs:
      return None
    return self.treedef.unflatten([leaf.partition_spec for leaf in self.leaves])

  def shard_params(self, sizes: Mapping[str, int]) -> PyTree:
    """Returns the shapes of one device's shards of the tree."""
    # sizes: length of every axis of the mesh.

    def cut(leaf: ExchangedLeaf) -> jax.ShapeDtypeStruct:
      shape = list(leaf.shape)
      for i, names in enumerate(leaf.spec):
        shape[i] //= count_devices(names, sizes)
      return jax.ShapeDtypeStruct(shape, leaf.like.dtype)

    return self.treedef.unflatten(map(cut, self.leaves))


def count_devices(axis_name: AxisName, sizes: Mapping[str, int]) -> int:
  """Returns the number of devices along some axes of a mesh."""
  return math.prod(sizes[name] for name in core.axis_names(axis_name))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeOptions(Options):
  """Arguments of one `exchange`, and the tree that it is for.

  Attributes:
    codec: the codec, or a tuple with one for each level.
  """

  kind = "exchange"

  codec: Codec | tuple[Codec, ...]
  method: str | None

  @property
  def codecs(self) -> tuple[Codec, ...]:
    """The codec of every level."""
    return (self.codec,) if isinstance(self.codec, Codec) else self.codec

  def state_layout(self, sizes: Mapping[str, int]) -> StateLayout:
    """Returns how the devices of a mesh keep the states of arrays."""
    workers, devices = core.split_axes(self.axis_name)
    return StateLayout(
      self.codecs[0],
      count_devices(workers, sizes),
      self.method,
      count_devices(devices, sizes) if devices else None,
      canonical=not isinstance(self.codec, Codec),
    )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedOptions(Options):
  """Arguments of one `sharded`, and the tree that it is for.

  Attributes:
    weight_codec: codec of the differences, or None.
    tx: the transformation inside; None for options that a file held.
  """

  kind = "sharded"

  gradient_codec: Codec
  weight_codec: Codec | None
  tx: optax.GradientTransformation | None = dataclasses.field(
    default=None, compare=False, repr=False
  )

  @property
  def codecs(self) -> tuple[Codec, ...]:
    """The codec of the gradients."""
    return (self.gradient_codec,)


def note_options(
  state: Any, options: Options, params: PyTree, specs: PyTree | None
) -> Any:
  """Returns a fresh state that says what it was made for."""
  core.know_in_flax(type(options))
  full = PartitionSpec() if specs is None else specs
  named = zip(
    core.named_leaves(params),
    jax.tree.leaves(_model_axes.spread_specs(full, params)),
    strict=True,
  )
  made_for = dataclasses.replace(
    options,
    leaves=tuple(
      ExchangedLeaf(path, tuple(x.shape), str(x.dtype), _list_axes(spec))
      for (path, x), spec in named
    ),
    has_specs=specs is not None,
    treedef=jax.tree.structure(params),
  )
  return state._replace(made_for=made_for)


def _list_axes(spec: PartitionSpec) -> tuple[tuple[str, ...], ...]:
  """Returns the axes of each dimension, up to the last that any shards."""
  axes = tuple(map(core.spec_axes, spec))
  count = max((i + 1 for i, names in enumerate(axes) if names), default=0)
  return axes[:count]


def check_made_for(name: str, made_for: Any, wanted: Any, noun: str) -> None:
  """Raises unless a state was made for certain options, by what differs."""
  if made_for == wanted:
    return
  for field in dataclasses.fields(wanted):
    own, other = (getattr(one, field.name) for one in (wanted, made_for))
    if field.compare and own != other:
      raise ValueError(
        f"`{name}` must be made for the {field.name} of this {noun}, "
        f"{own!r:.200}, got one for {other!r:.200}: continue it by "
        "`checkpoint.resize`."
      )
