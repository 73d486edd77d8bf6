"""Actions on residuals, and the options that choose among them."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jaxmotion import codecs, core, perfmodel


@dataclasses.dataclass(frozen=True)
@core.declare(
  codec=core.optional(core.instance(codecs.Codec, "a Codec or None"))
)
class offload:
  """Saves a residual in host memory, encoded first.

  Args:
    codec: the codec it is encoded by; None saves it exactly, masks as bits.

  Raises:
    TypeError: `codec` is no codec.

  Example:
    >>> from jaxmotion import codecs
    >>> offload(codecs.cast("bfloat16"))
    offload(codec=cast(dtype='bfloat16'))
  """

  codec: codecs.Codec | None = None


@dataclasses.dataclass(frozen=True)
class recompute:
  """Recomputes a residual in the backward pass, whatever that costs.

  An argument of the function cannot be recomputed and is saved.

  Example:
    >>> recompute()
    recompute()
  """


@dataclasses.dataclass(frozen=True)
@core.declare(
  codec=core.optional(
    core.instance((codecs.Codec, offload), "a Codec, `offload` or None")
  )
)
class save:
  """Saves a residual even where others are recomputed at no cost to memory.

  Without it, a residual that follows from saved ones is recomputed where every
  step in between may be.

  Args:
    codec: how it is saved; a codec, `offload`, or None for exactly.

  Raises:
    TypeError: `codec` is none of these.

  Example:
    >>> save(offload())
    save(codec=offload(codec=None))
  """

  codec: codecs.Codec | offload | None = None


Action = codecs.Codec | offload | recompute | save | None
"""How one residual is saved; None saves it exactly, a mask as bits."""

ResidualRules = Sequence[tuple[str, Action]]
"""Pairs of a regular expression and an action; the first match decides."""

ResidualChoice = Callable[[Any], Action]
"""A function of a `Residual` that returns its action."""


class Options(NamedTuple):
  """Options of the choice of residuals."""

  choose: ResidualChoice
  memory_budget: float | None  # Share of the residuals' bytes, or bytes.
  device: perfmodel.Device  # Whose times are predicted.
  measure: bool = False  # Whether to measure the nonzeros of sparse residuals.


@core.declare(
  memory_budget=core.optional(core.number(0)),
  device=core.optional(core.instance(perfmodel.Device, "a Device")),
)
def make_options(
  codec: Action | ResidualRules | ResidualChoice,
  memory_budget: float | None = None,
  device: perfmodel.Device | None = None,
) -> Options:
  """Returns the options that `compress_residuals` was given, checked."""
  if device is None:
    device = perfmodel.builtin_platform("h100_node").device
  return Options(make_choice(codec), memory_budget, device)


def make_choice(
  codec: Action | ResidualRules | ResidualChoice,
) -> ResidualChoice:
  """Turns the `codec` of `compress_residuals` into a function of a residual."""
  # A codec that was given for all residuals is returned for those alone that it
  # can encode.
  if isinstance(codec, codecs.zero_value):
    return lambda residual: codec if residual.kind == "sparse" else None
  if isinstance(codec, codecs.Codec):
    return lambda residual: codec if residual.is_float else None
  if isinstance(codec, offload | save):
    make, inner = type(codec), make_choice(codec.codec)
    return lambda residual: make(inner(residual))  # type: ignore[arg-type]
  if codec is None or isinstance(codec, recompute):
    return lambda residual: codec
  if callable(codec) and not isinstance(codec, type):
    return codec
  if isinstance(codec, list | tuple):
    return _choose_by_rules(codec)
  raise TypeError(
    "`codec` must be a Codec, `offload`, `recompute`, pairs of a pattern and "
    f"one of these, a function of a Residual, or None, got {codec!r}."
  )


def check_rules(
  codec: Action | ResidualRules | ResidualChoice,
  list_names: Callable[[], Iterable[str]],
) -> None:
  """Raises if a rule matches no residual, whether saved or recomputed."""
  # Without rules, nothing is chosen for the names.
  if isinstance(codec, list | tuple):
    rules = core.PathRules(codec, "codec", "codec or action")
    rules.require_use(list_names(), "residual")


def _choose_by_rules(rules: ResidualRules) -> ResidualChoice:
  """Returns the choice of the first rule that matches a residual's name."""
  patterns = core.PathRules(rules, "codec", "codec or action")
  choices = [make_choice(action) for _, action in patterns]

  def choose(residual: Any) -> Action:
    match = patterns.first_match(residual.name)
    return None if match is None else choices[match.rule](residual)

  return choose


def save_only_these_names(
  *names: str, codec: codecs.Codec | offload | None = None
) -> ResidualRules:
  """Makes rules that save residuals of some names, and recompute all others.

  Args:
    *names: labels that `jax.ad_checkpoint.checkpoint_name` gave.
    codec: how these are saved; None saves them exactly.

  Returns:
    Rules, the `codec` of `compress_residuals`. A name that no residual has is
    an error there.

  Raises:
    TypeError: a name is no string, or `codec` is none.
    ValueError: there are no names.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from jax.ad_checkpoint import checkpoint_name
    >>> from jaxmotion.memory import residuals_of
    >>> def loss(w, x):
    ...   x = checkpoint_name(jnp.tanh(x @ w), "hidden")
    ...   return jnp.sum(jnp.sin(x @ w))
    >>> w, x = jnp.ones((64, 64)), jnp.ones((64, 64))
    >>> rules = save_only_these_names("hidden")
    >>> [r.name for r in residuals_of(loss, w, x, codec=rules)]
    ['dense/1', 'dense/hidden']
  """
  return (*_name_rules("names", names, save(codec)), ("", recompute()))


def save_and_offload_only_these_names(
  *,
  names_which_can_be_saved: Sequence[str],
  names_which_can_be_offloaded: Sequence[str],
  codec: codecs.Codec | None = None,
) -> ResidualRules:
  """Makes rules that save or offload residuals of some names alone.

  All others are recomputed.

  Args:
    names_which_can_be_saved: labels of residuals that stay on the device.
    names_which_can_be_offloaded: labels of those that go to the host.
    codec: how both are encoded; None saves them exactly.

  Returns:
    Rules, the `codec` of `compress_residuals`.

  Raises:
    TypeError: a name is no string, or `codec` is no codec.
    ValueError: there are no names.

  Example:
    >>> save_and_offload_only_these_names(
    ...   names_which_can_be_saved=["hidden"],
    ...   names_which_can_be_offloaded=["attention"],
    ... )
    (('/hidden$', save(codec=None)), \
('/attention$', save(codec=offload(codec=None))), ('', recompute()))
  """
  stays, to_host = save(codec), save(offload(codec))
  return (
    *_name_rules("names_which_can_be_saved", names_which_can_be_saved, stays),
    *_name_rules(
      "names_which_can_be_offloaded", names_which_can_be_offloaded, to_host
    ),
    ("", recompute()),
  )


def _name_rules(
  argument: str, names: Any, action: Action
) -> tuple[tuple[str, Action], ...]:
  """Returns a rule for each label."""
  names = core.sequence("names", core.text)(argument, names)
  if not names:
    raise ValueError(f"`{argument}` must hold a name, got {names!r}.")
  return tuple((f"/{re.escape(name)}$", action) for name in names)
