"""Types, names of mesh axes, trees, rules for their paths, and text tables."""

import dataclasses
import inspect
import math
import re
import sys
from collections.abc import (
  Callable,
  Collection,
  Hashable,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import jax

Array: TypeAlias = jax.Array
# An array or a jax.ShapeDtypeStruct: only `.shape` and `.dtype` are read.
ShapedLike: TypeAlias = Any
PyTree: TypeAlias = Any
Value = TypeVar("Value")
_Names: TypeAlias = Hashable | tuple[Hashable, ...]


@dataclasses.dataclass(frozen=True)
class HostAxes:
  """Names the mesh axes of the hosts and of the devices of each host.

  Functions take it as the workers' `axis_name`: the workers are the devices of
  all hosts. An exchange then reduces within a host first, and each payload
  crosses to another host once. A tuple of the same names is another exchange,
  in which each device sends to all others.

  Attributes:
    hosts: the axis of the hosts, or a tuple of axes.
    devices: the axis of the devices of one host, or a tuple of axes.

  Raises:
    TypeError, ValueError: one of both is no name, or they share one.

  Example:
    >>> from jaxmotion import HostAxes
    >>> axes = HostAxes("host", "device")
    >>> axes.names
    ('host', 'device')
    >>> jax.P(axes.names)  # Functions of JAX take the names.
    P(('host', 'device'),)
  """

  hosts: _Names
  devices: _Names

  def __post_init__(self) -> None:
    """Raises unless both are names, and gives equal axes one form."""
    for field in ("hosts", "devices"):
      names = getattr(self, field)
      mesh_axes(field, names)
      # A tuple of one name is that name, so that equal axes compare as equal.
      if isinstance(names, tuple) and len(names) == 1:
        object.__setattr__(self, field, names[0])
    if set(axis_names(self.hosts)) & set(axis_names(self.devices)):
      raise ValueError(
        f"`devices` must name axes other than `hosts` = {self.hosts!r}, got "
        f"{self.devices!r}."
      )

  @property
  def names(self) -> tuple[Any, ...]:
    """The names of all axes, those of the hosts first."""
    return (*axis_names(self.hosts), *axis_names(self.devices))


# One mesh (or pmap) axis, several that are exchanged over together, or both.
AxisName: TypeAlias = _Names | HostAxes


def axis_names(axis_name: AxisName) -> tuple[Any, ...]:
  """Returns the axis names as a tuple."""
  if isinstance(axis_name, HostAxes):
    return axis_name.names
  return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def count_devices(axis_name: AxisName, sizes: Mapping[str, int]) -> int:
  """Returns the number of devices along some axes of a mesh."""
  return math.prod(sizes[name] for name in axis_names(axis_name))


def comparable_axes(axis_name: AxisName) -> tuple[Any, ...] | HostAxes:
  """Returns axes in a form in which one name equals the tuple of it."""
  return axis_name if isinstance(axis_name, HostAxes) else axis_names(axis_name)


def split_axes(axis_name: AxisName) -> tuple[Any, Any]:
  """Returns the axes of hosts and of their devices, or of workers and ()."""
  if isinstance(axis_name, HostAxes):
    return axis_name.hosts, axis_name.devices
  return axis_name, ()


def mesh_axes(name: str, value: Any) -> Any:
  """Returns the name of a mesh axis, or a tuple of several, or raises."""
  names = value if isinstance(value, tuple) else (value,)
  are_names = {str}.issuperset(map(type, names))
  if are_names and len(set(names)) == len(names) > 0:
    return value
  raise (ValueError if are_names else TypeError)(
    f"`{name}` must be the name of a mesh axis or a tuple of names, got "
    f"{value!r}."
  )


def worker_axes(name: str, value: Any) -> AxisName:
  """Returns the names that JAX takes for all workers' axes, or raises."""
  if isinstance(value, HostAxes):
    return value.names
  return mesh_axes(name, value)


def shape_dtype(x: Any) -> jax.ShapeDtypeStruct:
  """Returns the shape and dtype of `x`, without its data."""
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


def leaf_path(key_path: Any) -> str:
  """Returns a leaf's key path as a string such as `a/b/0`."""
  # A last attribute `value` is that of the box that flax puts around an array
  # (`nnx.Variable`, `nn.Partitioned`). Without it a kernel ends in `kernel`
  # whatever library holds it.
  if key_path and key_path[-1] == jax.tree_util.GetAttrKey("value"):
    key_path = key_path[:-1]
  return jax.tree_util.keystr(key_path, simple=True, separator="/")


def same_structure(a: PyTree, b: PyTree) -> bool:
  """Returns whether two trees have the same structure.

  >>> same_structure([1, (2,)], [3, (4,)]), same_structure([1], (1,))
  (True, False)
  """
  one: Any = jax.tree.structure(a)
  return one == jax.tree.structure(b)


def named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
  """Returns (path, leaf) for every leaf, in the order of `tree.flatten`."""
  return [(leaf_path(p), x) for p, x in jax.tree.leaves_with_path(tree)]


def find_nodes(tree: PyTree, kinds: type | tuple[type, ...]) -> list[Any]:
  """Returns the outermost nodes of a tree that are objects of some classes."""
  is_kind = lambda node: isinstance(node, kinds)
  return list(filter(is_kind, jax.tree.leaves(tree, is_leaf=is_kind)))


def tree_bytes(tree: PyTree) -> int:
  """Returns the bytes of all arrays (or shapes with a dtype) of a tree.

  >>> tree_bytes([jax.ShapeDtypeStruct((2, 3), "float32"), None])
  24
  """
  leaves = jax.tree.leaves(tree)
  return sum(math.prod(a.shape) * int(a.dtype.itemsize) for a in leaves)


def count_device_bytes(fun: Callable[..., PyTree], *args: PyTree) -> int:
  """Returns the bytes of results that a function leaves on the device.

  >>> x = jax.ShapeDtypeStruct((2,), "int8")
  >>> count_device_bytes(lambda x: (x, x[0]), x)
  3
  """
  # `jax.eval_shape` does not say which results are moved to the host.
  results = jax.make_jaxpr(fun)(*args).out_avals
  on_host = jax.memory.Space.Host
  return tree_bytes([a for a in results if a.memory_space != on_host])


def know_in_flax(cls: type) -> None:
  """Lets flax's serialization pass by a class whose objects hold no arrays."""
  # Its file holds what a class says of itself, and refuses classes that it does
  # not know. A program that uses it has loaded it before it makes a state.
  serialization = sys.modules.get("flax.serialization")
  if serialization is not None:
    serialization.register_serialization_state(
      cls, lambda node: {}, lambda node, _: node, override=True
    )


def set_public_module(name: str, namespace: dict[str, Any]) -> None:
  """Makes the public classes of a room name the room as their module."""
  # Python prints `__module__` in tracebacks. It would name the private file in
  # which a class is written, from which nobody should import it.
  # name, namespace: `__name__` and `globals()` of the room.
  for key, value in namespace.items():
    if (
      inspect.isclass(value)
      and not key.startswith("_")
      and value.__module__.startswith(f"{name}.")
    ):
      value.__module__ = name


def text_table(
  rows: Sequence[Sequence[str]], right: Collection[int] = ()
) -> str:
  """Aligns cells into columns that are two blanks apart.

  >>> print(text_table([("name", "bytes"), ("w", "4"), ("b", "16")], right=[1]))
  name  bytes
  w         4
  b        16
  """
  # rows: all of equal lengths, the header first. right: positions of the
  # columns whose cells are aligned to the right.
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return "\n".join(
    "  ".join(
      cell.rjust(width) if index in right else cell.ljust(width)
      for index, (cell, width) in enumerate(zip(row, widths, strict=True))
    ).rstrip()
    for row in rows
  )


class Match(NamedTuple, Generic[Value]):
  """Describes the first rule that matches a path."""

  rule: int  # Position of the rule.
  found: re.Match[str]  # Where in the path the pattern matches.
  value: Value  # The thing that the rule pairs with its pattern.


class PathRules(Generic[Value]):
  """Pairs regular expressions with values and tries them in order on a path."""

  def __init__(
    self,
    rules: Iterable[tuple[str, Value]],
    name: str = "rules",
    value: str = "value",
  ):
    """Compiles the patterns; raises unless each rule is a valid pair."""
    # name: the caller's argument; value: noun for its values.
    self._name = name
    self._pairs: list[tuple[re.Pattern[str], Value]] = []
    for rule in rules:
      if (
        not isinstance(rule, tuple | list)
        or len(rule) != 2
        or not isinstance(rule[0], str)
      ):
        raise TypeError(
          f"`{name}` must be pairs of a pattern and a {value}, got {rule!r}."
        )
      try:
        self._pairs.append((re.compile(rule[0]), rule[1]))
      except re.error as e:
        raise ValueError(
          f"`{name}` must have regular expressions, got {rule[0]!r} ({e})."
        ) from e

  def __iter__(self) -> Iterator[tuple[str, Value]]:
    return ((pattern.pattern, value) for pattern, value in self._pairs)

  def first_match(self, path: str) -> Match[Value] | None:
    """Returns the first rule that matches the path, or None."""
    for index, (pattern, value) in enumerate(self._pairs):
      # A pattern matches anywhere in a path, which is one of `leaf_path`.
      if found := pattern.search(path):
        return Match(index, found, value)
    return None

  def require_match(self, path: str, default: str) -> Match[Value]:
    """Returns the first rule that matches the path, or raises."""
    # default: the rule to end with, for the message.
    if match := self.first_match(path):
      return match
    patterns = ", ".join(repr(pattern) for pattern, _ in self)
    raise ValueError(
      f"`{self._name}` must cover every leaf, got {path!r}, which matches none "
      f"of {patterns}: end with {default}."
    )

  def require_use(self, paths: Iterable[str], leaf: str = "leaf") -> None:
    """Raises unless every pattern matches one of the paths at least."""
    # leaf: noun for what has a path, for the message.
    every: list[Any] = list(paths)
    for pattern, _ in self._pairs:
      if not any(pattern.search(path) for path in every):
        listed = ", ".join(map(repr, every))
        raise ValueError(
          f"`{self._name}` must match a {leaf} each, got {pattern.pattern!r}, "
          f"which matches none of {listed or f'no {leaf}'}."
        )
