import signal

import pytest
from absl import flags
from absl.testing import flagsaver

from experiments.common import records
from experiments.common.console import JobError
from experiments.weights import run as weights_run
from experiments.weights.model import StageCost


# By the library that reads the default configuration.
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_job_prints_tables_and_writes_rows_and_a_plot(
  tmp_path, tiny_hosted, monkeypatch, capsys
):
  from experiments.weights import __main__ as command

  config = tiny_hosted("weights_vgg", cases=("fp32", "awp"), seeds=(0,))
  # Lowering the paper's network takes longer than the job: see test_staged.
  monkeypatch.setattr(weights_run, "vgg_a_costs", lambda: [StageCost(9, 4.0)])
  json, plot = tmp_path / "rows.jsonl", tmp_path / "plot.png"
  if not flags.FLAGS.is_parsed():
    flags.FLAGS(["weights"])
  with flagsaver.flagsaver(
    config=config,
    json=str(json),
    plot=str(plot),
    link="pcie5_x16",
    workdir=str(tmp_path / "job"),
  ):
    command.main()
  # A signal that another test sends still is that test's own.
  assert signal.set_wakeup_fd(-1) == -1
  printed = capsys.readouterr().out
  for part in ("153.93", "0.853", "pcie5_x16", "Predicted ms"):
    assert part in printed
  assert "\x1b[" not in printed
  rows = records.read_rows(json)
  ours = {row.case for row in rows if not row.case.startswith("paper_")}
  assert ours == {"fp32", "awp"}
  cells = {(row.case, row.metric): row for row in rows}
  assert len(cells) == len(rows)
  assert cells["awp", "sent_ratio"].value > 3
  # Here the host is the device: no transfer was measured.
  assert all(
    "emulated" in row.unit
    for (case, metric), row in cells.items()
    if case in ours and ("host_ms" in metric or "device_ms" in metric)
    if not metric.startswith("predicted")
  )
  assert plot.read_bytes().startswith(b"\x89PNG")
  assert (tmp_path / "job" / "runs.jsonl").exists()


def test_a_misspelt_case_is_refused_before_any_work(tiny_hosted):
  with pytest.raises(JobError, match=r"`config.cases` must .*got 'int7'"):
    weights_run.run_experiment(
      tiny_hosted("weights_vgg", cases=("fp32", "int7"))
    )
