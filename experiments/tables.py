"""Prints tables of rows as Markdown: those of the README and of the docs.

  python -m experiments.tables docs/results/train_digits.jsonl

The first word of a row's `experiment` names the subject whose function lays the
rows out.
"""

from collections.abc import Callable, Sequence

from absl import app

from experiments import history
from experiments.activations import rows as activations
from experiments.codecs import tables as codecs
from experiments.common import records
from experiments.common.records import Row
from experiments.common.tables import Table
from experiments.hetero import rows as hetero
from experiments.hosts import rows as hosts
from experiments.islands import tables as islands
from experiments.kernels import tables as kernels
from experiments.planner import rows as planner
from experiments.race import rows as race
from experiments.residuals import tables as residuals
from experiments.study import rows as study
from experiments.train import rows as train
from experiments.weights import rows as weights

_SUMMARIES: dict[str, Callable[[Sequence[Row]], Table]] = {
  "activations": activations.summary_table,
  "codecs": codecs.summary_table,
  "gpu": residuals.steps_table,
  "hetero": hetero.summary_table,
  "history": history.summary_table,
  "hosts": hosts.summary_table,
  "islands": islands.summary_table,
  "kernels": kernels.summary_table,
  "planner": planner.summary_table,
  "race": race.summary_table,
  "residuals": residuals.summary_table,
  "study": study.summary_table,
  "train": train.summary_table,
  "weights": weights.summary_table,
}


def render_markdown(rows: Sequence[Row]) -> str:
  """Returns the table that the docs show of these rows, as Markdown."""
  if not rows:
    raise ValueError("`rows` must hold at least one row, got none.")
  subject = rows[0].experiment.split("_")[0]
  if subject not in _SUMMARIES:
    raise ValueError(
      f"`experiment` must begin with one of {', '.join(_SUMMARIES)}, got"
      f" {rows[0].experiment!r}."
    )
  try:
    return _SUMMARIES[subject](rows).to_markdown()
  # Rows that are missing or of another command fail where the table looks.
  except (
    *(ArithmeticError, AttributeError, LookupError),
    *(StopIteration, TypeError, ValueError),
  ) as error:
    raise ValueError(
      f"`rows` must be all that experiments.{subject} writes:"
      f" {type(error).__name__} {error}."
    ) from error


def main(argv: Sequence[str]) -> None:
  """Prints one table for each file of rows."""
  if len(argv) < 2:
    raise app.UsageError("Name at least one file of rows, got none.")
  for path in argv[1:]:
    try:
      text = render_markdown(records.read_rows(path))
    except ValueError as error:
      raise SystemExit(f"No table of {path}: {error}") from error
    print(text)


if __name__ == "__main__":
  app.run(main)
