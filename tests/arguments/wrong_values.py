"""Wrong values for an argument, and which of them its annotation allows."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NAN, HUGE = float("nan"), 10**30
TRACER = object()  # A stand-in: tracers live only while something is traced.
WRONG: dict[str, Any] = {
  "none": None,
  "misspelt": "misspelt",
  "nan": NAN,
  "inf": float("inf"),
  "minus_one": -1,
  "zero": 0,
  "huge": HUGE,
  "true": True,
  "fraction": 1.5,
  "object": object(),
  "class": dict,
  "empty": [],
  "list": [object()],
  "dict": {"misspelt": object()},
  "tracer": TRACER,
}
# What an annotation allows: a function may accept it or refuse it by name. A
# number is an array without axes, and nothing is a tree without leaves.
ALLOWED = {
  "none": {"none"},
  "bool": {"true"},
  "int": {"numpy"},
  "float": {"numpy", "fraction"},
  "array": {"numpy", "fraction", "tracer"},
  "tree": {"numpy", "fraction", "tracer", "none", "empty"},
}
# What is not tried: numbers are all the same to what takes arrays, and a class
# can be called.
_NUMBERS = {"nan", "inf", "minus_one", "zero", "true"}
UNTRIED = {"array": _NUMBERS, "tree": _NUMBERS, "callable": {"class"}}
# An error about these may name the other argument that they do not fit.
RELATIVE = {"minus_one", "zero", "huge", "empty", "wrapped", "reshaped"}
KINDS = {
  "None": "none",
  "bool": "bool",
  "int": "int",
  "float": "float",
  "Array": "array",
  "Any": "tree",
  "PyTree": "tree",
  "ShapedLike": "array",
  "Callable": "callable",
}
# Trees that have to fit another argument.
PAIRED = {"state", "payload", "payloads", "memory", "buffers", "old_state"}


def kinds_of(parameter: inspect.Parameter) -> set[str]:
  """Returns the kinds of values that an argument's annotation allows."""
  annotation = parameter.annotation
  text = annotation if isinstance(annotation, str) else _write(annotation)
  if parameter.default is None:
    text += " | None"
  # What stands in brackets is about parts of the value, not about the value.
  while (shorter := re.sub(r"\[[^\[\]]*\]", "", text)) != text:
    text = shorter
  names = [name.strip().split(".")[-1] for name in text.split("|")]
  return {KINDS[name] for name in names if name in KINDS}


def _write(annotation: Any) -> str:
  if isinstance(annotation, type) and not hasattr(annotation, "__args__"):
    return "None" if annotation is type(None) else annotation.__name__
  return str(annotation)


def wrong_values(
  name: str, parameter: inspect.Parameter, valid: Any
) -> Iterator[tuple[str, Any, bool]]:
  """Yields label, value, and whether the annotation allows to accept it.

  Args:
    name: name of the argument.
    parameter: its annotation and default.
    valid: its value in the valid call.
  """
  kinds = kinds_of(parameter)
  values = dict(WRONG)
  if type(valid) in (int, float):
    kind = np.float32 if "float" in kinds else np.int64
    values["numpy"] = kind(valid)
  if name in PAIRED and jax.tree.leaves(valid):
    values["wrapped"] = [valid]
    values["reshaped"] = jax.tree.map(_reshape, valid)
  allowed = set().union(*(ALLOWED.get(kind, ()) for kind in kinds))
  untried = set().union(*(UNTRIED.get(kind, ()) for kind in kinds))
  for label, value in values.items():
    if label not in untried and not any(
      _same(value, other) for other in (valid, parameter.default)
    ):
      yield label, value, label in allowed


def _reshape(leaf: Any) -> Any:
  if not hasattr(leaf, "shape"):
    return leaf
  return jnp.asarray(np.zeros((3, *leaf.shape), leaf.dtype))


def _same(a: Any, b: Any) -> bool:
  return a is b or (type(a) is type(b) and type(a) in (int, float) and a == b)
