"""Rows of generated cases: counts for each subject."""

from collections.abc import Mapping

import jax

from experiments.common import records
from experiments.fuzz import run


def make_rows(tallies: Mapping[str, run.Tally]) -> list[records.Row]:
  """Returns rows of the rounds, cases, defects and seconds of each subject."""
  stamp = (records.describe_machine(), jax.__version__)
  return [
    records.Row("fuzz", name, metric, value, unit, None, None, None, *stamp)
    for name, tally in tallies.items()
    for metric, value, unit in (
      ("rounds", tally.rounds, "rounds"),
      ("cases", tally.cases, "cases"),
      ("defects", len(tally.defects), "defects"),
      ("seconds", tally.seconds, "s"),
    )
  ]
