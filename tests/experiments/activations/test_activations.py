import functools

import pytest
from absl import flags
from absl.testing import flagsaver

from experiments.activations import __main__ as activations, run
from experiments.activations.cases import CODES, OURS, PUBLISHED_CODE
from experiments.common import records
from experiments.common.console import make_console
from experiments.models import catalog
from tests.experiments.tiny_network import make_tiny


def test_it_trains_measures_predicts_and_writes(tmp_path, monkeypatch, capsys):
  network = functools.partial(make_tiny, repeats=1, stride=1)
  monkeypatch.setitem(catalog.NETWORKS, "tiny", network)
  monkeypatch.setitem(run.NARROW_WIDTHS, "tiny", 1.0)
  flags.FLAGS.unparse_flags()
  flags.FLAGS(["activations"])
  json, plot = tmp_path / "rows.jsonl", tmp_path / "plot.png"
  with flagsaver.flagsaver(
    nets=["tiny"],
    looks=["0", "2"],
    batch=8,
    json=str(json),
    plot=str(plot),
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


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"nets": ["gpt"]}, "`nets` must be some of alexnet, .* got 'gpt'"),
    ({"steps": [2, 1]}, r"`looks` must ascend .* got \[2, 1\]"),
    ({"steps": []}, "`looks` must ascend"),
  ],
)
def test_settings_are_checked(changes, message):
  given = {"nets": ["nin"], "steps": [1]} | changes
  with pytest.raises(ValueError, match=message):
    run.measure_networks(
      **given,
      data="digits",
      image=32,
      batch=8,
      seed=0,
      console=make_console(),
    )
