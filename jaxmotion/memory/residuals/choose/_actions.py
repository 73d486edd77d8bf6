"""What may be done with a residual besides encoding it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxmotion.codecs import Codec, zero_value


@dataclasses.dataclass(frozen=True)
class offload:
  """Keeps a residual on the host, encoded first.

  Args:
    codec: what it is encoded by; None: as it is, masks as bits.

  Raises:
    TypeError: `codec` is no codec.

  Example:
    >>> from jaxmotion import codecs
    >>> offload(codecs.cast("bfloat16"))
    offload(codec=cast(dtype='bfloat16'))
  """

  codec: Codec | None = None

  def __post_init__(self) -> None:
    if not (self.codec is None or isinstance(self.codec, Codec)):
      raise TypeError(f"`codec` must be a Codec or None, got {self.codec!r}.")


@dataclasses.dataclass(frozen=True)
class recompute:
  """Keeps nothing of a residual: it is computed again, whatever it costs.

  An argument of the function cannot be, and is kept.

  Example:
    >>> recompute()
    recompute()
  """


Action = Codec | offload | recompute | None
ResidualRules = Sequence[tuple[str, Action]]
ResidualChoice = Callable[[Any], Action]


def make_choice(
  asked: Action | ResidualRules | ResidualChoice,
) -> ResidualChoice:
  """Turns what a user asks for into a function of a residual.

  Raises:
    TypeError: it is none of what it may be.
    ValueError: a rule is no pair of a regular expression and an action.
  """
  if isinstance(asked, zero_value):
    return lambda residual: asked if residual.kind == "sparse" else None
  if isinstance(asked, Codec):
    return lambda residual: asked if residual.is_float else None
  if isinstance(asked, offload):
    inner = make_choice(asked.codec)
    return lambda residual: offload(inner(residual))  # type: ignore[arg-type]
  if asked is None or isinstance(asked, recompute):
    return lambda residual: asked
  if callable(asked):
    return asked
  if isinstance(asked, list | tuple):
    return _by_rules(asked)
  raise TypeError(
    "`codec` must be a Codec, `offload`, `recompute`, pairs of a pattern and "
    f"one of these, a function of a Residual, or None, got {asked!r}."
  )


def _by_rules(rules: ResidualRules) -> ResidualChoice:
  for rule in rules:
    if not (isinstance(rule, tuple | list) and len(rule) == 2):
      raise ValueError(
        f"`codec` must hold pairs of a pattern and an action, got {rule!r}."
      )
    try:
      re.compile(rule[0])
    except (re.error, TypeError) as e:
      raise ValueError(
        f"`codec` must have regular expressions, got {rule[0]!r} ({e})."
      ) from e
  chosen = [(pattern, make_choice(action)) for pattern, action in rules]

  def choose(residual: Any) -> Action:
    for pattern, choose in chosen:
      if re.search(pattern, residual.name):
        return choose(residual)
    return None

  return choose
