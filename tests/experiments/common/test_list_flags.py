"""Tests of flags whose items are checked while they are parsed."""

import pytest
from absl import flags

from experiments.common import list_flags


def check_sum(numbers):
  if sum(numbers) > 9:
    raise ValueError("must sum to 9 or less.")


list_flags.define_names("lf_names", ["int4"], ["int4", "sign"], "Names.")
list_flags.define_numbers(
  "lf_counts", [1, 2], "Counts.", low=1, check=check_sum
)
list_flags.define_numbers(
  "lf_shares", [0.5], "Shares.", low=0, high=1, above_low=True, least=0
)
list_flags.define_numbers(
  "lf_widths", [8, 8], "Widths.", low=1, least=2, may_repeat=True
)
list_flags.define_item("lf_item", None, int, "A number.")


@pytest.fixture
def parse():
  """Returns the value of a flag that a command line gives."""

  def parse(*arguments):
    name = arguments[0].partition("=")[0].removeprefix("--")
    try:
      flags.FLAGS(["run", *arguments])
      return flags.FLAGS[name].value
    finally:
      flags.FLAGS[name].unparse()

  return parse


@pytest.mark.parametrize(
  ("argument", "value"),
  [
    ("--lf_names=sign, int4", ["sign", "int4"]),
    ("--lf_counts=3,1", [3, 1]),
    ("--lf_shares=1,1e-6", [1, 1e-6]),
    ("--lf_shares=", []),
    ("--lf_widths=4,4,2", [4, 4, 2]),
    ("--lf_item=7", 7),
  ],
)
def test_items_are_parsed(parse, argument, value):
  assert parse(argument) == value


@pytest.mark.parametrize(
  ("argument", "message"),
  [
    (
      "--lf_names=int4,int5",
      "must be one of int4, sign, got 'int5'; did you mean 'int4'?",
    ),
    ("--lf_names=int4,", "must be one of int4, sign, got ''."),
    ("--lf_names=", "must have 1 item or more."),
    ("--lf_names=sign,sign", "must have each item once, got 'sign' twice."),
    ("--lf_counts=1,x", "`lf_counts` must be an integer >= 1, got 'x'."),
    ("--lf_counts=1.5", "`lf_counts` must be an integer >= 1, got 1.5."),
    ("--lf_counts=0", "`lf_counts` must be an integer >= 1, got 0."),
    ("--lf_counts=8,2", "must sum to 9 or less."),
    ("--lf_shares=0,5", "`lf_shares` must be a number in (0, 1], got 0."),
    ("--lf_shares=nan", "`lf_shares` must be a number in (0, 1], got nan."),
    ("--lf_widths=4", "must have 2 items or more."),
  ],
)
def test_a_wrong_item_is_refused_in_one_line(parse, argument, message):
  with pytest.raises(flags.IllegalFlagValueError) as caught:
    parse(argument)
  assert str(caught.value) == f"flag {argument}: {message}"


def test_a_flag_that_is_given_twice_is_refused(parse):
  with pytest.raises(flags.IllegalFlagValueError, match="already defined"):
    parse("--lf_names=int4", "--lf_names=sign")


def test_the_help_shows_the_text_of_the_default():
  assert flags.FLAGS["lf_shares"].default_as_str == "'0.5'"
  assert flags.FLAGS["lf_shares"].value == [0.5]
