"""Arguments of exchanges, which their states hold as static data."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxmotion import core, hosts
from jaxmotion.codecs import Codec
from jaxmotion.collectives.extend import StateLayout, check_weight
from jaxmotion.core import AxisName, PyTree
from jaxmotion.transforms import _model_axes, _states

Init = Callable[[PyTree, PyTree | None], Any]


class ExchangedLeaf(NamedTuple):
  """One array of the tree that an exchange is for."""

  path: str  # Place in the tree, such as `a/b/0`.
  shape: tuple[int, ...]
  dtype: str
  # Axes of the model that shard each dimension, up to the last that any shards.
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
  """Arguments of one exchange, and the tree that it is for."""

  kind: ClassVar[str]

  axis_name: tuple[Any, ...] | core.HostAxes
  op: str = "mean"
  # Arrays of the tree, in its order; () before `init`.
  leaves: tuple[ExchangedLeaf, ...] = dataclasses.field(default=(), repr=False)
  # Specs that shard nothing are equal to none: `leaves` tell what is sharded.
  has_specs: bool = dataclasses.field(default=False, compare=False, repr=False)
  # These are None for options that a file held. Functions of two runs are never
  # equal. init: (parameters, specs) -> state.
  treedef: Any = dataclasses.field(default=None, compare=False, repr=False)
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

  def note_tree(self, params: PyTree, specs: PyTree | None) -> "Options":
    """Returns the options with the tree that they are for."""
    full = PartitionSpec() if specs is None else specs
    leaves = [
      ExchangedLeaf(path, tuple(x.shape), str(x.dtype), _list_axes(spec))
      for (path, x), spec in zip(
        core.named_leaves(params),
        jax.tree.leaves(_model_axes.spread_specs(full, params)),
        strict=True,
      )
    ]
    return dataclasses.replace(
      self,
      leaves=tuple(leaves),
      has_specs=specs is not None,
      treedef=jax.tree.structure(params),
    )


def _list_axes(spec: PartitionSpec) -> tuple[tuple[str, ...], ...]:
  """Returns the axes of each dimension, up to the last that any shards."""
  axes = tuple(map(core.spec_axes, spec))
  count = max((i + 1 for i, names in enumerate(axes) if names), default=0)
  return axes[:count]


def count_devices(axis_name: AxisName, sizes: Mapping[str, int]) -> int:
  """Returns the number of devices along some axes of a mesh."""
  return math.prod(sizes[name] for name in core.axis_names(axis_name))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeOptions(Options):
  """Arguments of one `exchange`, and the tree that it is for."""

  kind = "exchange"

  codec: Codec | tuple[Codec, ...]  # A tuple has one for each level.
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
  """Arguments of one `sharded`, and the tree that it is for."""

  kind = "sharded"

  gradient_codec: Codec
  weight_codec: Codec | None  # That of the differences of weights.
  # The transformation inside; None for options that a file held.
  tx: optax.GradientTransformation | None = dataclasses.field(
    default=None, compare=False, repr=False
  )

  @property
  def codecs(self) -> tuple[Codec, ...]:
    """The codec of the gradients."""
    return (self.gradient_codec,)


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


def check_options(state: Any, kind: type, options: Options) -> None:
  """Raises unless a state was made for an exchange with these arguments."""
  _states.check_counts(state, kind)
  if type(state.made_for) is not type(options):
    raise TypeError(
      "`state` must say what it was made for, as that of `init` does, got "
      f"{state.made_for!r:.200}."
    )
  # The arrays say by their shapes which tree they are for.
  options = dataclasses.replace(options, leaves=state.made_for.leaves)
  check_made_for("state", state.made_for, options, "exchange")


def map_exchange(
  one: Any, options: Options, codecs: tuple[Codec, ...]
) -> tuple[Callable[[PyTree], Any], Callable[..., tuple[PyTree, Any]]]:
  """Returns the `init` of an exchange, and its update of a checked state."""
  init_mapped, update_mapped = _model_axes.map_model_axes(one, codecs)

  def make_state(params: PyTree, specs: PyTree | None) -> Any:
    core.know_in_flax(type(options))
    made_for = dataclasses.replace(options, init=make_state)
    state = init_mapped(params, specs)
    return state._replace(made_for=made_for.note_tree(params, specs))

  def init(params: PyTree) -> Any:
    core.check_arrays("params", params, numbers=False)
    return make_state(params, None)

  def update(
    updates: PyTree, state: Any, params: PyTree, args: dict[str, Any]
  ) -> tuple[PyTree, Any]:
    check_weight(args["weight"])
    args = args | {"sending": hosts.check_sending(args["sending"])}
    made_for = state.made_for
    # The options are no arrays, so the map does not take them.
    state = state._replace(made_for=None)
    updates, state = update_mapped(updates, state, params, args, made_for.specs)
    return updates, state._replace(made_for=made_for)

  return init, update
