"""The example goes on with the processes that live."""

import re
import subprocess
import sys

import pytest

from tests.paths import ROOT
from tests.processes import WAIT, environment, free_address


@pytest.mark.slow
def test_a_job_goes_on_when_a_process_is_killed():
  command = [sys.executable, ROOT / "examples" / "survive.py"]
  address = free_address()
  processes = [
    subprocess.Popen(
      [*command, str(i), "3", address],
      cwd=ROOT,
      env=environment(cache=False),
      stdout=subprocess.PIPE,
      text=True,
    )
    for i in range(3)
  ]
  try:
    for line in processes[2].stdout:
      if line.startswith("step 5: loss"):
        break
    processes[2].kill()
    said = [p.communicate(timeout=WAIT)[0] for p in processes[:2]]
  finally:
    for process in processes:
      with process:
        process.kill()
  for text in said:
    (lost,) = re.findall(r"step (\d+): lost processes \[2\]", text)
    # The step that failed is made again, and none is left out.
    assert f"step {lost}: 2 workers" in text
    steps = re.findall(r"step (\d+): loss ([\d.]+)", text)
    assert [int(step) for step, _ in steps] == [*range(1, 41)]
    assert float(steps[-1][1]) < float(steps[int(lost) - 1][1]) / 2
  assert said[0].split("step 6: ")[1:] == said[1].split("step 6: ")[1:]
