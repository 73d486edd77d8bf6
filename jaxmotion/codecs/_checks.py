"""Checks of arguments that are codecs."""

from typing import Any

from jaxmotion.codecs import _codec


def check_codec(
  name: str,
  codec: Any,
  *,
  trees: bool = False,
  stateless: bool = False,
  one_round: bool = False,
) -> None:
  """Raises unless an argument is a codec of the kind that the caller takes.

  Args:
    name: the argument's name, for the message.
    codec: what the caller gave.
    trees: whether codecs of whole trees are allowed as well.
    stateless: whether codecs with state, such as error memory, are refused.
    one_round: whether codecs that reduce in rounds of their own are refused.

  Raises:
    TypeError: not a codec, or a codec of trees where `trees` is False.
    ValueError: a codec with state where `stateless` is True, or with rounds
      where `one_round` is True.

  >>> check_codec("codec", 8)
  Traceback (most recent call last):
  ...
  TypeError: `codec` must be a codec of arrays, got 8.
  """
  if not isinstance(codec, _codec.Codec) or (codec.is_tree and not trees):
    kind = "a codec" if trees else "a codec of arrays"
    raise TypeError(f"`{name}` must be {kind}, got {codec!r}.")
  if stateless and codec.has_state:
    raise ValueError(f"`{name}` must be a codec without state, got {codec!r}.")
  if one_round and codec.round_kinds:
    raise ValueError(
      f"`{name}` must be a codec that encodes without other workers, got "
      f"{codec!r}: give it to `all_reduce` or `exchange`."
    )
