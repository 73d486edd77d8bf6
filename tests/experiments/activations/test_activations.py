import functools

from experiments.activations import __main__ as activations
from experiments.activations.codes import CODES, OURS, PUBLISHED_CODE
from experiments.common.tables import index_rows
from experiments.models import catalog, training
from tests.experiments.tiny_network import make_tiny


def test_it_trains_measures_predicts_and_writes(monkeypatch, run_main):
  network = functools.partial(make_tiny, repeats=1, stride=1)
  monkeypatch.setitem(catalog.NETWORKS, "tiny", network)
  monkeypatch.setitem(training.NARROW_WIDTHS, "tiny", 1.0)
  given = {"nets": ["tiny"], "looks": [0, 2], "batch": 8, "seed": 0}
  rows, said = run_main(activations.main, plot=True, **given)
  assert "not measured" in said and "really takes" in said
  cells = index_rows(rows)
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
