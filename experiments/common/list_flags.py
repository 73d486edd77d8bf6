"""Flags of names, of numbers, and of items that a function parses.

A wrong item is refused while the flags are parsed, before any work. The error
is one line with the flag, what an item must be, what it was, and the nearest
name. Runners may share the name of a flag; the last one that is imported wins.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, TypeVar

from absl import flags

from experiments.common import names
from jaxmotion import core

flags.disclaim_key_flags()  # They are key flags of the runner that asks.

T = TypeVar("T")


def define_names(
  name: str,
  default: Collection[str],
  known: Collection[str],
  text: str,
  *,
  least: int = 1,
) -> flags.FlagHolder[list[str]]:
  """Defines a flag whose items are names."""

  def parse(item: str) -> str:
    names.check_name(item, known)
    return item

  return define_items(name, tuple(default), parse, text, least=least)


def define_numbers(
  name: str,
  default: Sequence[float],
  text: str,
  *,
  low: float,
  high: float = math.inf,
  above_low: bool = False,
  least: int = 1,
  may_repeat: bool = False,
  check: Callable[[list[Any]], None] | None = None,
) -> flags.FlagHolder[list[Any]]:
  """Defines a flag whose items are numbers."""

  def parse(item: str) -> float:
    value = _read_number(item)
    if all(type(number) is int for number in default):
      core.integer(int(low))(name, value)
    else:
      core.number(low, high, open_low=above_low)(name, value)
    return value

  return define_items(
    name,
    tuple(map(str, default)),
    parse,
    text,
    least=least,
    may_repeat=may_repeat,
    check=check,
  )


def define_items(
  name: str,
  default: Sequence[str],
  parse: Callable[[str], T],
  text: str,
  *,
  least: int = 1,
  may_repeat: bool = False,
  check: Callable[[list[T]], None] | None = None,
) -> flags.FlagHolder[list[T]]:
  """Defines a flag of items with commas between them."""
  parser = _ItemsParser(parse, least, may_repeat, check)
  return _define_parsed(name, ",".join(default), parser, text)


def define_item(
  name: str, default: str | None, parse: Callable[[str], T], text: str
) -> flags.FlagHolder[T]:
  """Defines a flag of one item."""
  return _define_parsed(name, default, _ItemParser(parse), text)


def _define_parsed(
  name: str, default: str | None, parser: flags.ArgumentParser, text: str
) -> flags.FlagHolder[Any]:
  # Of a flag that is given twice, absl would take the last without a word.
  holder = flags.DEFINE(
    parser, name, default, text, allow_override=True, allow_overwrite=False
  )
  if default is not None:
    flags.FLAGS[name].default_as_str = repr(default)
  return holder


class _ItemParser(flags.ArgumentParser, Generic[T]):
  """Parses the text of one item with its function."""

  def __init__(self, parse: Callable[[str], T]):
    self._parse = parse

  def parse(self, argument: str) -> T:
    """Returns the item of a text."""
    return self._parse(argument.strip())

  def flag_type(self) -> str:
    """Returns the name of the type for `--help`."""
    return "text"


class _ItemsParser(flags.ArgumentParser, Generic[T]):
  """Parses items with commas between them."""

  syntactic_help = "items with commas between them"

  def __init__(
    self,
    parse: Callable[[str], T],
    least: int,
    may_repeat: bool,
    check: Callable[[list[T]], None] | None,
  ):
    self._parse, self._check = parse, check
    self._least, self._may_repeat = least, may_repeat

  def parse(self, argument: str) -> list[T]:
    """Returns the items of a text."""
    texts = [part.strip() for part in argument.split(",")] if argument else []
    items = [self._parse(text) for text in texts]
    if len(items) < self._least:
      noun = "item" if self._least == 1 else "items"
      raise ValueError(f"must have {self._least} {noun} or more.")
    for text in texts:
      if texts.count(text) > 1 and not self._may_repeat:
        raise ValueError(f"must have each item once, got {text!r} twice.")
    if self._check:
      self._check(items)
    return items

  def flag_type(self) -> str:
    """Returns the name of the type for `--help`."""
    return "comma separated list"


def _read_number(text: str) -> Any:
  """Returns a number, or the text itself if it is none."""
  for kind in (int, float):
    try:
      return kind(text)
    except ValueError:
      pass
  return text
