import math

import pytest

from experiments.perfmodel import tables
from experiments.perfmodel.rows import validation_rows
from experiments.perfmodel.score import Pair, make_decisions, score_errors


def pair(exchange, predicted, measured, noise=0.0, shape="width 8"):
  unseen = "width, exchange"
  return Pair("here", shape, exchange, unseen, predicted, measured, noise)


EXACT = [pair("fp32", 3.0, 3.0), pair("int8", 2.0, 2.0), pair("sign", 1.0, 1.0)]


def test_errors_are_relative_and_signs_cancel_in_the_bias_alone():
  found = score_errors(EXACT)
  assert (found.mape, found.bias, found.worst) == (0, 0, 0)
  assert found.rank == pytest.approx(1)
  (choice,) = make_decisions(EXACT)
  assert (choice.chosen, choice.best, choice.regret) == ("sign", "sign", 0)
  assert choice.is_right and choice.is_right_to_compress
  found = score_errors([pair("fp32", 1.2, 1.0), pair("int8", 1.6, 2.0)])
  assert found.mape == pytest.approx(0.2)
  assert found.bias == pytest.approx(0)
  assert found.worst == pytest.approx(0.2)


def test_the_rank_is_spearmans_correlation():
  up = score_errors([pair("fp32", 1.0, 10.0), pair("int8", 2.0, 1e6)])
  down = score_errors([pair("fp32", 2.0, 10.0), pair("int8", 1.0, 1e6)])
  assert (up.rank, down.rank) == pytest.approx((1, -1))
  # Of four, two neighbors swapped: 1 - 6 * 2 / (4 * 15).
  swapped = [(1, 1), (2, 3), (3, 2), (4, 4)]
  found = score_errors([pair("fp32", x, y) for x, y in swapped])
  assert found.rank == pytest.approx(0.8)
  assert math.isnan(score_errors(EXACT[:1]).rank)


def test_a_wrong_choice_costs_its_regret_and_noise_excuses_it():
  wrong = [pair("fp32", 1.0, 1.5, 0.1), pair("int8", 2.0, 1.0, 0.2)]
  (choice,) = make_decisions(wrong)
  assert (choice.chosen, choice.best) == ("fp32", "int8")
  assert choice.regret == pytest.approx(0.5)
  assert not choice.is_right and not choice.is_right_to_compress
  (excused,) = make_decisions([p._replace(noise=0.6) for p in wrong])
  assert excused.is_right and excused.is_right_to_compress
  (other,) = make_decisions(
    [pair("fp32", 9, 9), *EXACT[1:-1], pair("sign", 3, 1)]
  )
  assert (other.chosen, other.best) == ("int8", "sign")
  assert not other.is_right and other.is_right_to_compress
  # Every shape is a choice, among exchanges only.
  alone = pair("none", 0.1, 0.1)
  both = [*EXACT, alone, *(p._replace(shape="width 9") for p in EXACT)]
  found = make_decisions(both)
  assert [d.shape for d in found] == ["width 8", "width 9"]
  assert {d.chosen for d in found} == {"sign"}


def test_rows_and_tables_have_every_pair_and_score():
  pairs = [*EXACT, pair("none", 0.5, 1.0, 0.1)]
  found = make_decisions(pairs)
  rows = validation_rows(pairs, found)
  values = {(r.experiment, r.case, r.metric): r.value for r in rows}
  here = "perfmodel_validate_here"
  assert values[here, "none width 8", "predicted_step_ms"] == 500
  assert values[here, "all", "mape"] == pytest.approx(0.125)
  assert values[here, "held out: width, exchange", "bias"] == -0.125
  assert values[here, "all", "decision_accuracy"] == 1
  assert values["perfmodel_validate_all", "all", "regret"] == 0
  assert len(tables.step_table(pairs).lines) == 4
  assert len(tables.error_table(pairs).lines) == 2
  assert len(tables.decision_table(found).lines) == 1
