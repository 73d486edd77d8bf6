"""Parameters of training steps, and what becomes of each one's argument."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmotion import core
from jaxmotion.core import PyTree
from jaxmotion.transforms.step import _step_arguments

Names = str | Sequence[str]
Numbers = int | Sequence[int]

# Values of static arguments with their names and types: 1 is not True.
Static = tuple[tuple[str, type, Any], ...]


class StepOptions:
  """Choices of `jax.jit` for the arguments of a step, checked."""

  def __init__(
    self,
    static_argnames: Names,
    static_argnums: Numbers,
    donate_argnames: Names,
    donate_argnums: Numbers,
  ) -> None:
    self.names = {
      "static_argnames": _check_several("static_argnames", static_argnames),
      "donate_argnames": _check_several("donate_argnames", donate_argnames),
    }
    # Positions count from the end if negative.
    self.numbers = {
      "static_argnums": _check_positions("static_argnums", static_argnums),
      "donate_argnums": _check_positions("donate_argnums", donate_argnums),
    }


class StepParameters:
  """Parameters of a training step that are split, static or donated.

  Attributes:
    split: names of the parameters that are split.
    static: names of those whose values the trace sees.
    donated: names of those whose buffers are given to the results.
    name: name of the step, for messages.
  """

  def __init__(
    self, fun: Any, split: Sequence[str], options: StepOptions
  ) -> None:
    core.check_callable("fun", fun)
    self._fun = fun
    self._signature = inspect.signature(fun)
    self.name = getattr(fun, "__name__", type(fun).__name__)
    self.split = tuple(split)
    self._check_names("batch", self.split)
    self.static = self._choose(options, "static")
    self.donated = self._choose(options, "donate")
    for name, others in (
      ("batch", self.split),
      ("donate_argnames", self.donated),
    ):
      if both := set(others) & set(self.static):
        raise ValueError(
          f"`{name}` must name no static parameters, got {sorted(both)}."
        )

  def bind(
    self, args: Sequence[Any], kwargs: Mapping[str, Any]
  ) -> tuple[dict[str, PyTree], Static]:
    """Returns the arguments that are traced by name, and the static ones."""
    # Defaults of the step are left to it, as `jax.jit` leaves them.
    bound = self._signature.bind(*args, **kwargs)
    traced = dict(bound.arguments)
    for name in (*self.split, *self.donated):
      default = self._signature.parameters[name].default
      if name not in traced and default is not inspect.Parameter.empty:
        traced[name] = default
    static = []
    for name in self.static:
      if name in traced:
        value = traced.pop(name)
        static.append((name, type(value), value))
        try:
          hash(value)
        except TypeError as error:
          raise TypeError(
            f"`{name}` must be hashable, because it is static, got "
            f"{value!r:.200}."
          ) from error
    return traced, tuple(static)

  def call(self, traced: Mapping[str, PyTree], static: Static) -> Any:
    """Calls the step with arguments that `bind` returned."""
    # traced: arguments by name, as one worker sees them.
    bound = self._signature.bind_partial()
    bound.arguments.update(traced)
    bound.arguments.update({name: value for name, _, value in static})
    return self._fun(*bound.args, **bound.kwargs)

  def _check_names(self, argument: str, names: Sequence[str]) -> None:
    for name in names:
      if name not in self._signature.parameters:
        listed = ", ".join(self._signature.parameters)
        raise ValueError(
          f"`{argument}` must name parameters of the step ({listed}), got "
          f"{name!r}."
        )

  def _choose(self, options: StepOptions, kind: str) -> tuple[str, ...]:
    """Returns names of parameters that names and positions choose."""
    names = options.names[f"{kind}_argnames"]
    self._check_names(f"{kind}_argnames", names)
    known = list(self._signature.parameters)
    found = list(names)
    for number in options.numbers[f"{kind}_argnums"]:
      if not -len(known) <= number < len(known):
        raise ValueError(
          f"`{kind}_argnums` must be positions of the step's {len(known)} "
          f"parameters, got {number}."
        )
      found.append(known[number])
    return tuple(dict.fromkeys(found))


def check_traced(traced: Mapping[str, PyTree]) -> None:
  """Raises if an argument that is not static has leaves that are no arrays."""
  for name, tree in traced.items():
    try:
      core.check_arrays(name, tree)
    except TypeError as error:
      raise TypeError(
        f"{error} Name it in `static_argnames` if it is no data."
      ) from None


def _check_several(name: str, value: Any) -> tuple[str, ...]:
  return _step_arguments.check_names(
    name, (value,) if isinstance(value, str) else value
  )


def _check_positions(name: str, value: Any) -> tuple[int, ...]:
  numbers = (value,) if isinstance(value, int) else value
  if not isinstance(numbers, Sequence) or isinstance(numbers, str | bytes):
    raise TypeError(
      f"`{name}` must be a position or a list or tuple of them, got {value!r}."
    )
  for number in numbers:
    core.check_int(name, number, -(2**31), 2**31 - 1)
  return tuple(numbers)
