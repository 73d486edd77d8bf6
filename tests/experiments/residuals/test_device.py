import pytest

from experiments.residuals import device

GPT = {"layers": 2, "length": 8, "heads": 2, "width": 1 / 64, "classes": 16}


@pytest.mark.skipif(device.has_gpu(), reason="there is a GPU")
def test_a_step_runs_in_a_process_of_its_own():
  found = device.measure_step("gpt", GPT, 2, "everything", steps=2)
  assert found.reason == ""
  assert found.step_ms > 0
  assert found.peak_bytes is None  # A host does not say.


def test_a_failed_measurement_has_its_reason():
  found = device.measure_step("gpt", GPT, 2, "fast", steps=1)
  assert "`mode` must be one of" in found.reason
