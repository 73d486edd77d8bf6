import signal

import pytest
from absl import flags
from absl.testing import flagsaver

from experiments.common import records
from experiments.common.console import JobError
from experiments.perfmodel import validate
from jaxmotion import perfmodel
from tests import compile_fast

SMALL = {
  "known_widths": [8, 16],
  "known_batches": [2, 4],
  "shapes": [(12, 4)],
  "exchanges": ["none", "fp32", "sign_feedback"],
  "rounds": 1,
  "steps": 1,
  "sizes": 2,
  "largest": 8192,
  "emulated": [],
  "between": [],
  "rates": [],
}


@pytest.fixture(autouse=True)
def fast_workers(monkeypatch):
  """Lets worker processes compile fast, and restores the signal handler."""
  monkeypatch.setenv("XLA_FLAGS", compile_fast.flags())
  monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
  handler = signal.getsignal(signal.SIGTERM)
  yield
  signal.signal(signal.SIGTERM, handler)


def run_command(**values):
  if not flags.FLAGS.is_parsed():
    flags.FLAGS(["validate"])
  with flagsaver.flagsaver(**SMALL | values):
    validate.main()


@pytest.mark.parametrize(
  ("testbed", "place"),
  [
    ("emulated2", {"emulated": [2]}),
    pytest.param(
      "hosts2_loopback", {"rates": ["loopback"]}, marks=pytest.mark.slow
    ),
  ],
)
def test_a_small_run_calibrates_measures_and_scores(
  tmp_path, capsys, testbed, place
):
  json, plot = tmp_path / "rows.jsonl", tmp_path / "plot.png"
  folder = tmp_path / "platforms"
  run_command(json=str(json), plot=str(plot), platforms=str(folder), **place)
  rows = records.read_rows(json)
  assert {row.experiment for row in rows} == {
    f"perfmodel_validate_{testbed}",
    "perfmodel_validate_all",
  }
  steps = [row for row in rows if row.metric == "predicted_step_ms"]
  assert len(steps) == 3
  for row in steps:
    assert row.value > 0 and row.baseline > 0
  metrics = {row.metric for row in rows}
  assert {"mape", "bias", "decision_accuracy", "regret"} <= metrics
  assert plot.read_bytes().startswith(b"\x89PNG")
  platform = perfmodel.load_platform(folder / f"{testbed}.json")
  assert "all_gather 2" in platform.axis("data").link.measured
  assert ("emulated" in platform.sources["device.call_s"]) == (
    testbed == "emulated2"
  )
  assert "Which exchange is the fastest" in capsys.readouterr().out


def test_testbeds_that_cannot_be_predicted_are_refused():
  with pytest.raises(JobError, match="must name a testbed, got none"):
    run_command()
  for emulated in ([2], [2, 3], []):
    with pytest.raises(JobError, match="`--between` must lie between .* got 3"):
      run_command(emulated=emulated, between=[3])
