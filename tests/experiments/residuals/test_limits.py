import io

import pytest
import rich.console

from experiments.common.progress import Display
from experiments.residuals import (
  limits,
  measure,
  streamed,
  tables,
  training,
)
from experiments.residuals.networks import NetworkSpec


def _make_line(base, slope, bend=0):
  """Returns a compiler of programs on a line, and the sizes it was given."""
  seen = []

  def compile_size(size):
    seen.append(size)
    nbytes = base + slope * size + bend * size**2
    return measure.StepMemory("none", nbytes, 0, 0, 0, 0.0)

  return compile_size, seen


def test_the_largest_size_is_read_off_a_line_and_compiled():
  compile_size, seen = _make_line(100, 7)
  found = limits.search_largest(compile_size, 1000, (2, 5))
  assert (found.size, found.memory.device_bytes) == (128, 996)
  assert found.drawn_bytes == 996
  assert seen == [2, 5, 128]


def test_a_size_that_does_not_fit_moves_the_line():
  compile_size, seen = _make_line(100, 7, bend=0.02)
  found = limits.search_largest(compile_size, 1000, (2, 5))
  assert len(seen) > 3
  assert found.memory.device_bytes <= 1000
  assert found.size == seen[-1]


def test_a_small_program_may_be_off_the_line():
  def compile_size(size):
    # Half a segment, then whole ones, in pages.
    pages = -(-(1400 * size + (5e5 if size < 64 else 6e5)) // 4096)
    return measure.StepMemory("none", int(4096 * pages), 0, 0, 0, 0.0)

  found = limits.search_largest(compile_size, 10_000_000, (40, 120))
  assert found.memory.device_bytes <= 10_000_000
  assert found.size > 0.99 * (10_000_000 - 6e5) / 1400


def test_the_largest_may_be_one_of_the_first():
  for limit in (114, 120):
    compile_size, _ = _make_line(100, 7)
    assert limits.search_largest(compile_size, limit, (2, 5)).size == 2


def test_no_size_is_found_if_the_smallest_does_not_fit():
  compile_size, _ = _make_line(100, 7)
  assert limits.search_largest(compile_size, 100, (2, 5)) is None


def test_the_compiler_is_told_of_the_limit(monkeypatch):
  asked = []

  def compile_step(step, target, memory_gib):
    pixels, _ = step.args[1]
    asked.append((target, memory_gib, pixels.shape[0]))
    return measure.StepMemory("none", pixels.shape[0] << 20, 0, 0, 0, 0.0)

  monkeypatch.setattr(measure, "compile_step", compile_step)
  spec = NetworkSpec("tiny", 1)
  found = limits.find_largest_batch(spec, "plain", "h100", 2**30, (1, 4))
  assert found.size == 1024
  assert asked == [("h100", 1.0, batch) for batch in (1, 4, 1024)]


def test_streamed_networks_are_compiled_in_segments(monkeypatch):
  asked = []

  def compile_step(net, batch, target, memory_gib):
    asked.append((net.name, batch, target, memory_gib))
    depth = int(net.name.removeprefix("resnet"))
    return measure.StepMemory("none", depth, 7, 0, 0, 0.0)

  monkeypatch.setattr(streamed, "compile_step", compile_step)
  found = limits.find_deepest("streamed", "h100", 1000.0, (1, 2))
  assert found.size == 992 and found.memory.host_temp_bytes == 7
  assert asked[-1] == ("resnet992", 16, "h100", 1000 / 2**30)


def test_the_papers_deepest_is_one_of_the_depths():
  assert limits.resnet_spec(138).make_network().name == "resnet2504"


@pytest.fixture
def train(monkeypatch):
  monkeypatch.setitem(training.NETWORKS, "tiny", {"width": 0.25, "repeats": 1})

  def run(case, net="tiny"):
    console = rich.console.Console(file=io.StringIO())
    with Display(console, steps=2, runs=1) as display:
      return training.train_network(
        net, case, steps=2, batch=16, seeds=1, image=32, display=display
      )

  return run


@pytest.mark.unoptimized
def test_rows_have_accuracies_and_errors_beside_plain_training(train):
  results = [train("fp32"), train("int8")]
  assert results[0].error == [0.0]
  assert 0 < results[1].error[0] < 0.05
  made = training.make_rows(results)
  assert {r.experiment for r in made} == {"residuals_accuracy_tiny"}
  (row,) = [r for r in made if r.case == "int8" and r.metric == "test_accuracy"]
  assert row.baseline == results[0].accuracy[0]
  assert row.value == results[1].accuracy[0]
  assert [line[1] for line in tables.accuracy_table(made).lines] == [
    "fp32",
    "int8",
  ]
