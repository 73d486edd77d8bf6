"""Declares what arguments must be; errors name the argument and its value.

A kind is a function of an argument's name and value. It returns the value to
use, or raises an error that says what the argument must be and what it was. No
bool is a number, and no tracer is a plain Python value.
"""

import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from jaxmotion.core import _tree

Kind: TypeAlias = Callable[[str, Any], Any]
_Declared = TypeVar("_Declared", bound=Callable[..., Any])


def declare(**kinds: Kind) -> Callable[[_Declared], _Declared]:
  """Makes a function or a dataclass check its arguments in every call.

  Defaults are not checked. A class is decorated before `dataclass` is applied,
  and its own `__post_init__` runs after the checks.
  """

  def decorate(target: Any) -> Any:
    if isinstance(target, type):
      return _declare_fields(target, kinds)
    parameters = inspect.signature(target).parameters
    assert kinds.keys() <= parameters.keys(), (target, kinds.keys())
    # What is left over belongs to `*args`, which the function checks itself.
    positional = [
      (name, kinds.get(name))
      for name, parameter in parameters.items()
      if parameter.kind <= parameter.POSITIONAL_OR_KEYWORD
    ]

    @functools.wraps(target)
    def checked(*args: Any, **kwargs: Any) -> Any:
      values = [
        kind(name, value) if kind else value
        for (name, kind), value in zip(positional, args, strict=False)
      ]
      for name, value in kwargs.items():
        if name in kinds:
          kwargs[name] = kinds[name](name, value)
      return target(*values, *args[len(positional) :], **kwargs)

    vars(checked)["declared"] = kinds
    return checked

  return decorate


def _declare_fields(cls: Any, kinds: Mapping[str, Kind]) -> Any:
  """Makes the `__post_init__` of a class check and convert its fields."""
  finish = vars(cls).get("__post_init__")

  def __post_init__(self: Any) -> None:
    for name, kind in kinds.items():
      value = getattr(self, name)
      used = kind(name, value)
      # Frozen classes refuse plain assignment.
      if used is not value:
        object.__setattr__(self, name, used)
    if finish is not None:
      finish(self)
    elif hasattr(super(cls, self), "__post_init__"):
      super(cls, self).__post_init__()

  cls.__post_init__, cls.declared = __post_init__, kinds
  return cls


def integer(low: int, high: int | None = None) -> Kind:
  """Makes the kind of Python integers in [low, high]."""
  span = f"in [{low}, {high}]" if high is not None else f">= {low}"

  def check(name: str, value: Any) -> Any:
    # Only plain Python values: the repr and the config of a codec print them.
    is_int = type(value) is int
    if is_int and low <= value and (high is None or value <= high):
      return value
    raise (ValueError if is_int else TypeError)(
      f"`{name}` must be an integer {span}, got {_describe_number(value)}"
    )

  return check


def seed(name: str, value: Any) -> Any:
  """Returns a seed of 32 bits, or raises."""
  return integer(0, 2**32 - 1)(name, value)


def measured(kind: Kind) -> Kind:
  """Makes a kind of numbers take NumPy's float64, of medians or products."""
  return lambda name, value: kind(
    name, float(value) if isinstance(value, float) else value
  )


def number(
  low: float = -math.inf,
  high: float = math.inf,
  *,
  open_low: bool = False,
  open_high: bool = False,
) -> Kind:
  """Makes the kind of finite Python numbers of an interval."""
  # No number reaches an infinite bound.
  open_low = open_low or math.isinf(low)
  open_high = open_high or math.isinf(high)
  left, right = "(" if open_low else "[", ")" if open_high else "]"

  def check(name: str, value: Any) -> Any:
    # Only plain Python values: the repr and the config of a codec print them.
    is_number = type(value) in (int, float)
    if is_number:
      above = low < value or (value == low and not open_low)
      below = value < high or (value == high and not open_high)
      if above and below:
        return value
    raise (ValueError if is_number else TypeError)(
      f"`{name}` must be a number in {left}{low:g}, {high:g}{right}, got "
      f"{_describe_number(value)}"
    )

  return check


def _describe_number(value: Any) -> str:
  """Describes what is no allowed number, and where an array may come from."""
  if not isinstance(value, jax.Array):
    return f"{value!r}."
  return (
    f"an array, {shape_string(value)}: write a Python number. "
    "optax.inject_hyperparams makes arrays of all numbers but those of its "
    "`static_args`."
  )


def choice(choices: Collection[Any]) -> Kind:
  """Makes the kind of values that are one of `choices`."""

  def check(name: str, value: Any) -> Any:
    for option in choices:
      if type(value) is type(option) and value == option:
        return value
    names = ", ".join(map(repr, choices))
    raise ValueError(f"`{name}` must be one of {names}, got {value!r}.")

  return check


def boolean(name: str, value: Any) -> Any:
  """Returns True or False, or raises."""
  if type(value) is not bool:
    raise TypeError(f"`{name}` must be True or False, got {value!r}.")
  return value


def text(name: str, value: Any) -> Any:
  """Returns a string, or raises."""
  if not isinstance(value, str):
    raise TypeError(f"`{name}` must be a string, got {value!r}.")
  return value


def function(name: str, value: Any) -> Any:
  """Returns what can be called, or raises."""
  if not callable(value):
    raise TypeError(f"`{name}` must be a function, got {value!r}.")
  return value


def instance(cls: type | tuple[type, ...], noun: str) -> Kind:
  """Makes the kind of objects of a class."""

  def check(name: str, value: Any) -> Any:
    if not isinstance(value, cls):
      raise TypeError(f"`{name}` must be {noun}, got {value!r:.300}.")
    return value

  return check


def optional(kind: Kind) -> Kind:
  """Makes the kind that allows None beside another kind."""

  def check(name: str, value: Any) -> Any:
    return None if value is None else kind(name, value)

  return check


def sequence(noun: str, kind: Kind | None = None) -> Kind:
  """Makes the kind of lists and tuples, used as tuples."""
  # kind: of each element, which is named `sizes[0]`.

  def check(name: str, value: Any) -> Any:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
      raise TypeError(
        f"`{name}` must be a list or tuple of {noun}, got {value!r:.300}."
      )
    if kind is None:
      return tuple(value)
    return tuple(
      kind(f"{name}[{i}]", element) for i, element in enumerate(value)
    )

  return check


def mapping(
  noun: str, kind: Kind | None = None, key: Kind | None = None
) -> Kind:
  """Makes the kind of mappings from strings, used as dicts."""
  # kind: of each value, and key: of each key, both named `measured['copy']`.

  def check(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping) or not all(
      isinstance(k, str) for k in value
    ):
      raise TypeError(f"`{name}` must be a dict of {noun}, got {value!r:.300}.")
    items = dict(value)
    for k in items:
      place = f"{name}[{k!r}]"
      if key is not None:
        key(place, k)
      if kind is not None:
        items[k] = kind(place, items[k])
    return items

  return check


def float_array(name: str, value: Any) -> Any:
  """Returns an array, or a shape, of a floating-point dtype, or raises."""
  shaped = hasattr(value, "shape") and hasattr(value, "dtype")
  if not shaped or not jnp.issubdtype(value.dtype, jnp.floating):
    found = shape_string(value) if shaped else f"{value!r:.200}"
    raise TypeError(f"`{name}` must be a floating-point array, got {found}.")
  return value


def arrays(name: str, value: _tree.PyTree) -> Any:
  """Returns a tree of arrays, shapes or numbers, or raises."""
  return _check_leaves(name, value, numbers=True)


def typed_arrays(name: str, value: _tree.PyTree) -> Any:
  """Returns a tree of arrays or shapes without Python numbers, or raises."""
  return _check_leaves(name, value, numbers=False)


def _check_leaves(name: str, tree: _tree.PyTree, *, numbers: bool) -> Any:
  """Returns a tree whose leaves are all arrays, or raises."""
  # numbers: whether Python numbers, which have no dtype, are allowed.
  for x in jax.tree.leaves(tree):
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
      continue
    if not is_array(x) or not (numbers or hasattr(x, "dtype")):
      named = _tree.named_leaves(tree)
      place = next(f" at {p!r}" if p else "" for p, y in named if y is x)
      raise TypeError(
        f"`{name}` must be a tree of arrays, got {x!r:.200}{place}."
      )
  return tree


def check_like(
  name: str, tree: _tree.PyTree, like: _tree.PyTree, source: str
) -> None:
  """Raises unless a tree of arrays has the structure and shapes of another."""
  # source: where a right tree comes from, for the message.
  arrays(name, tree)
  if not _tree.same_structure(tree, like):
    raise ValueError(
      f"`{name}` must be like that of {source}, got "
      f"{jax.tree.structure(tree)}, not {jax.tree.structure(like)}."
    )
  for (path, x), y in zip(
    _tree.named_leaves(tree), jax.tree.leaves(like), strict=True
  ):
    if jnp.shape(x) != jnp.shape(y):
      place = f" at {path!r}" if path else ""
      raise ValueError(
        f"`{name}` must be like that of {source}, got "
        f"{shape_strings(x)}{place}, not {shape_strings(y)}."
      )


def is_array(x: Any) -> bool:
  """Says whether JAX can compute with a leaf, or its type with a shape."""
  if isinstance(x, jax.ShapeDtypeStruct | jax.core.ShapedArray):
    return True
  try:
    jax.typeof(x)
  except (OverflowError, TypeError, ValueError):
    return False
  return True


def shape_string(x: Any) -> str:
  """Returns dtype and shape as JAX prints them, such as `float32[2,3]`."""
  return jax.core.ShapedArray(x.shape, x.dtype).str_short()


def shape_strings(tree: _tree.PyTree) -> str:
  """Returns dtypes and shapes of all leaves, for messages."""
  likes = [
    jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a))
    for a in jax.tree.leaves(tree)
  ]
  return ", ".join(map(shape_string, likes)) if likes else "no arrays"


def same_shapes(tree: _tree.PyTree, like: _tree.PyTree) -> bool:
  """Returns whether trees have one structure, and leaves like the other's."""
  # tree: arrays, or numbers; like: arrays, or ShapeDtypeStructs.
  return _tree.same_structure(tree, like) and all(
    jnp.shape(a) == b.shape and jnp.result_type(a) == b.dtype
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(like), strict=True)
  )


def check_buffers(
  args: Mapping[str, _tree.PyTree], donated: Collection[str] = ()
) -> None:
  """Raises unless every array exists and every donated one is given once."""
  # On several devices of one process, XLA:CPU ends the process where it should
  # raise. So the check comes before the call.
  owners: dict[int, str] = {}
  for name, tree in args.items():
    for leaf in jax.tree.leaves(tree):
      kind: Any = type(leaf)
      if not _has_buffer(kind):
        continue
      if leaf.is_deleted():
        raise ValueError(
          f"`{_find_places(args, leaf)[0]}` must be an array that still "
          "exists, got one whose buffer was donated to an earlier call: go on "
          "with what that call returned, copy before it (`jnp.copy`), or make "
          "a step that does not donate."
        )
      if id(leaf) not in owners:
        owners[id(leaf)] = name
        continue
      owner = owners[id(leaf)]
      if owner in donated or name in donated:
        first, second, *_ = _find_places(args, leaf)
        raise ValueError(
          f"`{second}` must be an array of its own, because "
          f"`{owner if owner in donated else name}` is donated, got the array "
          f"of `{first}`: copy one of them with `jnp.copy`."
        )


@functools.cache
def _has_buffer(kind: type) -> bool:
  """Returns whether leaves of this type are arrays of JAX and no tracers."""
  # By type, because `isinstance(leaf, jax.Array)` costs more than the rest of
  # the check, which every step makes.
  return hasattr(kind, "is_deleted") and not issubclass(kind, jax.core.Tracer)


def _find_places(
  args: Mapping[str, _tree.PyTree], leaf: jax.Array
) -> list[str]:
  """Names every place, argument and path, where an array is given."""
  return [
    f"{name}/{path}" if path else name
    for name, tree in args.items()
    for path, other in _tree.named_leaves(tree)
    if other is leaf
  ]
