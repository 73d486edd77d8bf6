import io

import pytest
import rich.console

from experiments.common.progress import Display
from experiments.residuals import accuracy


def run(case, net="alexnet"):
  console = rich.console.Console(file=io.StringIO())
  with Display(console, steps=2, runs=1) as display:
    return accuracy.run(
      net, case, steps=2, batch=16, seeds=1, image=32, display=display
    )


def test_rows_say_accuracies_and_errors_beside_plain_training():
  results = [run("fp32"), run("int8")]
  assert results[0].error == [0.0]
  assert 0 < results[1].error[0] < 0.05
  made = accuracy.rows(results)
  (row,) = [r for r in made if r.case == "int8" and r.metric == "test_accuracy"]
  assert row.baseline == results[0].accuracy[0]
  assert row.value == results[1].accuracy[0]
  assert accuracy.table(made).row_count == 2


def test_a_network_that_is_not_there_is_named():
  with pytest.raises(ValueError, match="`nets` must be some of .* got 'lenet'"):
    run("fp32", net="lenet")
