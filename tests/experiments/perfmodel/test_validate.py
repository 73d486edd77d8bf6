import contextlib
import json
import queue
import signal
import threading

import jax
import pytest

from experiments.common.console import JobError
from experiments.perfmodel import testbed, validate, worker
from jaxmotion import perfmodel
from tests import compile_fast
from tests.processes import WAIT

SMALL = {
  "known_widths": [8, 16],
  "known_batches": [2],
  "shapes": [(12, 4)],
  "exchanges": ["none", "fp32", "sign_feedback"],
  **{"rounds": 1, "steps": 1, "sizes": 2, "largest": 8192},
  **{"emulated": [], "between": [], "rates": []},
}


class Inline(contextlib.nullcontext):
  """Answers in this process what a testbed's own process would."""

  def __init__(self, hosts, module, arguments):
    assert module == worker.__name__ and arguments == ["--devices=2"]
    super().__init__(self)
    self.commands, self.replies = queue.Queue(), queue.Queue()
    answer = worker._answer_commands, (self.commands, self.replies.put)
    threading.Thread(target=answer[0], args=answer[1], daemon=True).start()

  def ask(self, command):
    self.commands.put(json.dumps(command))
    return [json.loads(json.dumps(self.replies.get(timeout=WAIT)))]

  def __exit__(self, *_):
    self.commands.put('{"do": "quit"}')


@pytest.fixture
def run_command(monkeypatch, run_main):
  # Processes of workers compile fast.
  monkeypatch.setenv("XLA_FLAGS", compile_fast.flags())
  monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
  handler = signal.getsignal(signal.SIGTERM)

  yield lambda **values: run_main(validate.main, **SMALL | values)
  signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
  ("name", "place"),
  [
    ("emulated2", {"emulated": [2]}),
    *(
      pytest.param(name, place, marks=pytest.mark.slow)
      for name, place in (
        ("hosts2_loopback", {"rates": ["loopback"]}),
        ("emulated3", {"emulated": [3]}),
      )
    ),
  ],
)
def test_a_small_run_calibrates_measures_and_scores(
  run_command, tmp_path, monkeypatch, name, place
):
  if name == "emulated2":
    monkeypatch.setattr(testbed, "HostGroup", Inline)
    monkeypatch.setattr(jax, "device_count", lambda: 2)
  folder = tmp_path / "platforms"
  rows, said = run_command(plot=True, platforms=str(folder), **place)
  assert {row.experiment for row in rows} == {
    f"perfmodel_validate_{name}",
    "perfmodel_validate_all",
  }
  steps = [row for row in rows if row.metric == "predicted_step_ms"]
  assert len(steps) == 3
  assert all(row.value > 0 and row.baseline > 0 for row in steps)
  metrics = {row.metric for row in rows}
  assert {"mape", "bias", "decision_accuracy", "regret"} <= metrics
  platform = perfmodel.load_platform(folder / f"{name}.json")
  measured = platform.axis("data").link.measured
  assert f"all_gather {platform.axis('data').workers}" in measured
  is_emulated = "emulated" in platform.sources["device.call_s"]
  assert is_emulated == name.startswith("emulated")
  assert "Which exchange is the fastest" in said


def test_testbeds_that_cannot_be_predicted_are_refused(run_command):
  with pytest.raises(JobError, match="must name a testbed, got none"):
    run_command()
  for emulated in ([2], [2, 3], []):
    with pytest.raises(JobError, match="`--between` must lie between .* got 3"):
      run_command(emulated=emulated, between=[3])
