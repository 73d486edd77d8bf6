"""Parameters of training steps, and what becomes of each one's argument."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxmotion import core
from jaxmotion.core import AxisName, PyTree
from jaxmotion.transforms import _init_state
from jaxmotion.transforms.step import _step_arguments

# Values of static arguments with their names and types: 1 is not True.
Static = tuple[tuple[str, type, Any], ...]


class StepParameters:
  """Parameters of a training step that are split, static or donated.

  Attributes:
    split: names of the parameters that are split.
    static: names of those whose values the trace sees.
    donated: names of those whose buffers are given to the results.
    name: name of the step, for messages.
  """

  def __init__(
    self, fun: Any, split: Sequence[str], options: Mapping[str, Sequence[Any]]
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

  def _choose(
    self, options: Mapping[str, Sequence[Any]], kind: str
  ) -> tuple[str, ...]:
    """Returns names of parameters that names and positions choose."""
    names = options[f"{kind}_argnames"]
    numbers = options[f"{kind}_argnums"]  # From the end if negative.
    self._check_names(f"{kind}_argnames", names)
    known = list(self._signature.parameters)
    for number in numbers:
      if not -len(known) <= number < len(known):
        raise ValueError(
          f"`{kind}_argnums` must be positions of the step's {len(known)} "
          f"parameters, got {number}."
        )
    return tuple(dict.fromkeys([*names, *(known[i] for i in numbers)]))


def make_decorator(
  map_step: Callable[..., Callable[..., Any]],
  mesh: Mesh,
  axis_name: AxisName,
  batch: str | Sequence[str],
  **options: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
  """Makes a decorator of steps by `map_step`, of options that it checks."""
  # map_step: (step, its parameters, mesh, axis_name) -> jitted step.
  # options: static and donated parameters, as `jax.jit` takes them.
  axis_name = _init_state.check_mesh(mesh, axis_name)
  split = _check_several("batch", batch)
  if not split:
    raise ValueError(
      f"`batch` must name a parameter of the step at least, got {batch!r}."
    )
  checked: dict[str, Sequence[Any]] = {
    name: _check_several(name, value)
    if name.endswith("names")
    else _check_positions(name, value)
    for name, value in options.items()
  }

  def decorate(fun: Callable[..., Any]) -> Callable[..., Any]:
    parameters = StepParameters(fun, split, checked)
    return map_step(fun, parameters, mesh, axis_name)

  return decorate


def _check_several(name: str, value: Any) -> tuple[str, ...]:
  names = (value,) if isinstance(value, str) else value
  return _step_arguments.check_names(name, names)


def _check_positions(name: str, value: Any) -> tuple[int, ...]:
  numbers = (value,) if isinstance(value, int) else value
  if not isinstance(numbers, Sequence) or isinstance(numbers, str | bytes):
    raise TypeError(
      f"`{name}` must be a position or a list or tuple of them, got {value!r}."
    )
  for number in numbers:
    core.check_int(name, number, -(2**31), 2**31 - 1)
  return tuple(numbers)
