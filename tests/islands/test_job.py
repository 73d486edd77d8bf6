"""An island of two processes, whose first one talks to the store."""

import json
import sys

from tests.islands import job_worker
from tests.paths import ROOT
from tests.processes import environment, free_address, run_together


def test_a_job_of_two_processes_has_the_bits_of_one(tmp_path):
  # Both lose a change that is not finite, and one that the run refuses.
  address = free_address()
  said, codes = run_together(
    [
      [
        *(sys.executable, "-m", "tests.islands.job_worker"),
        *(str(index), str(count), address, str(tmp_path / str(count))),
      ]
      for index, count in [(0, 1), (0, 2), (1, 2)]
    ],
    cwd=ROOT,
    env=environment(cache=False),
  )
  assert codes == [0, 0, 0]
  alone, *halves = [json.loads(text.splitlines()[-1]) for text in said]
  assert alone[-1][0] == job_worker.STEPS // 2 - 1
  for one, first, second in zip(alone, *halves, strict=True):
    assert one[0] == first[0] == second[0]
    # Each has half of the rows, in order, and the whole anchor.
    for i, whole in enumerate(one[1]):
      if i < len(job_worker.PARAMS):
        assert first[1][i] + second[1][i] == whole
      else:
        assert first[1][i] == second[1][i] == whole
