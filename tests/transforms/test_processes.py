"""Workers that are processes: their steps, and what they must agree on."""

import functools
import json
import re
import sys

import numpy as np
import pytest

from tests.paths import ROOT
from tests.processes import environment, free_address, run_together
from tests.transforms import worker


def run_in_processes(count, names, module="tests.transforms.worker"):
  address = free_address()
  command = [sys.executable, "-m", module]
  said, _ = run_together(
    [
      [*command, str(index), str(count), address, *names]
      for index in range(count)
    ],
    cwd=ROOT,
    env=environment(cache=False),
  )
  return [json.loads(text.splitlines()[-1]) for text in said]


QUICK = ("averaged", "own", "fully_sharded")


@functools.cache
def run_two():
  return run_in_processes(2, QUICK, "tests.transforms.disagreeing_worker")


def check_steps(names, processes):
  expected = worker.run(names)
  for found in processes:
    assert tuple(found) == names
    for name, (means, parts) in found.items():
      np.testing.assert_allclose(means, expected[name][0], rtol=1e-6, atol=1e-7)
      # Bit for bit, error memory and moments too.
      assert parts.items() <= expected[name][1].items(), name


def test_processes_compute_what_one_process_computes():
  check_steps(QUICK, [steps for steps, _ in run_two()])


@pytest.mark.slow
def test_a_process_for_each_device_computes_what_one_process_computes():
  # What is delayed is sent by a second thread then, where no model is shared.
  names = ("sharded", "delayed", "wide", "flights")
  check_steps(names, run_in_processes(4, names))


UNIFORM = r"uniform\(bits=4.*on process 0, .*uniform\(bits=8.*on process 1"
EXPECTED = {
  "same": "started",
  "values": r"`params` must be equal on all processes, got up = "
  r"float32\[16, 32\] of checksum .* on process 0, and float32\[16, 32\]",
  "shape": r"`params` .* got up = float32\[16, 32\] .* float32\[16, 24\]",
  "leaf": "`params` .* got .* = nothing on process 0, and float32.3.",
  "rate": "`scheme` .* got scale.step_size = -0.1 on .*, and -0.2 on",
  "schedule": "`scheme` .*schedule.decay_steps = 100 on .*, and 101 on",
  "codec": f"`scheme` .* got ExchangeOptions.codec = .*{UNIFORM}",
  "own_chain": f"`scheme` .* got opt_state/made_for = .*{UNIFORM}",
  "every": "`scheme` .* got LocalUpdates.every = 2 on .*, and 3 on",
  "weights": "`scheme` .* got GatherPlan.weight_codec = .*256.*512",
  "mean": "`model_state` .* got the array = float32",
  "local": "started",
  "closure": "started",
  "apart": "started",
}


@pytest.mark.parametrize("case", EXPECTED)
def test_processes_that_disagree_are_told_in_what(case):
  first, second = (said[case] for _, said in run_two())
  assert first == second
  assert re.search(EXPECTED[case], first), first
