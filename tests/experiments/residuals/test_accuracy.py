import io

import pytest
import rich.console

from experiments.common.progress import Display
from experiments.residuals import rows, tables, training


@pytest.fixture
def train(monkeypatch):
  monkeypatch.setitem(training.NETWORKS, "tiny", {"width": 0.25, "repeats": 1})

  def run(case, net="tiny"):
    console = rich.console.Console(file=io.StringIO())
    with Display(console, steps=2, runs=1) as display:
      return training.train_network(
        net, case, steps=2, batch=16, seeds=1, image=32, display=display
      )

  return run


def test_rows_have_accuracies_and_errors_beside_plain_training(train):
  results = [train("fp32"), train("int8")]
  assert results[0].error == [0.0]
  assert 0 < results[1].error[0] < 0.05
  made = rows.make_accuracy_rows(results)
  assert {r.experiment for r in made} == {"residuals_accuracy_tiny"}
  (row,) = [r for r in made if r.case == "int8" and r.metric == "test_accuracy"]
  assert row.baseline == results[0].accuracy[0]
  assert row.value == results[1].accuracy[0]
  assert [line[1] for line in tables.accuracy_table(made).lines] == [
    "fp32",
    "int8",
  ]
