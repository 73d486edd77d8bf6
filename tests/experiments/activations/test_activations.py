import functools

import pytest
from absl import flags
from absl.testing import flagsaver

from experiments.activations import __main__ as activations, measure
from experiments.activations.codes import CODES, OURS, PUBLISHED_CODE
from experiments.common import records
from experiments.models import catalog, training
from tests.experiments.tiny_network import make_tiny


def test_it_trains_measures_predicts_and_writes(tmp_path, monkeypatch, capsys):
  network = functools.partial(make_tiny, repeats=1, stride=1)
  monkeypatch.setitem(catalog.NETWORKS, "tiny", network)
  monkeypatch.setitem(training.NARROW_WIDTHS, "tiny", 1.0)
  flags.FLAGS.unparse_flags()
  flags.FLAGS(["activations"])
  json, plot = tmp_path / "rows.jsonl", tmp_path / "plot.png"
  with flagsaver.flagsaver(
    nets=["tiny"], looks=[0, 2], batch=8, seed=0, json=str(json), plot=str(plot)
  ):
    activations.main()
  printed = capsys.readouterr().out
  assert "not measured" in printed and "really takes" in printed
  assert plot.stat().st_size > 0
  cells = {(row.case, row.metric): row for row in records.read_rows(json)}
  for case in ("tiny", "mean", "tiny_step0", "tiny_step2"):
    assert 0 < cells[case, "sparsity"].value < 1
    for code in CODES:
      assert cells[case, f"{code}_ratio"].value > 0.9
  ours = cells["tiny", f"{OURS}_ratio"]
  assert ours.baseline == cells["tiny", f"{PUBLISHED_CODE}_ratio"].value
  assert ours.ratio == ours.value / ours.baseline > 1
  assert cells["tiny/stem/conv", "sparsity"].value > 0
  gain = cells["tiny", f"predicted_h200_{OURS}_gain"]
  assert gain.unit == "% (predicted)" and gain.value > 0
  assert cells["tiny", "gpu_gain"].value == "not measured"
  published = cells["published", f"{PUBLISHED_CODE}_ratio"]
  assert (published.value, published.machine) == (2.6, "arXiv:1705.01626")


def test_steps_must_ascend_to_the_end_of_a_schedule():
  measure.check_steps([0, 2])
  for steps in ([2, 1], [0, 1], [0]):
    got = ", ".join(map(str, steps))
    with pytest.raises(ValueError, match=f"ascend to 2 or more, got {got}"):
      measure.check_steps(steps)
