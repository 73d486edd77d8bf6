import functools
import io

import pytest
import rich.console

from experiments.common.progress import Display
from experiments.residuals import accuracy, limits, measure, streamed, tables
from experiments.residuals.networks import NetworkSpec


@pytest.mark.parametrize(
  ("bytes_of", "limit", "first", "tried"),
  [
    # A line, whose size is compiled at once.
    (lambda n: 100 + 7 * n, 1000, (2, 5), [128]),
    # A size that does not fit moves the line.
    (lambda n: 100 + 7 * n + 0.02 * n**2, 1000, (2, 5), [128, 94, 99]),
    # Half a segment, then whole ones, in pages: a small one is off the line.
    (
      lambda n: 4096 * -(-(1400 * n + (5e5 if n < 64 else 6e5)) // 4096),
      10_000_000,
      (40, 120),
      [3586, 6710],
    ),
    (lambda n: 100 + 7 * n, 114, (2, 5), []),  # The first is the largest.
    (lambda n: 100 + 7 * n, 120, (2, 5), []),
    (lambda n: 100 + 7 * n, 100, (2, 5), []),  # None fits.
  ],
)
def test_the_largest_size_that_fits_is_read_off_a_line(
  bytes_of, limit, first, tried
):
  seen = []

  def compile_size(size):
    seen.append(size)
    return measure.StepMemory("none", int(bytes_of(size)), 0, 0, 0, 0.0)

  found = limits.search_largest(compile_size, limit, first)
  assert seen == [*first, *tried]
  fitting = [n for n in seen if bytes_of(n) <= limit]
  assert (found and found.size) == max(fitting, default=None)
  if tried:
    assert found.memory.device_bytes > 0.98 * limit
  if tried == [128]:
    assert found.drawn_bytes == found.memory.device_bytes == 996


def test_a_search_goes_on_where_steps_need_more_than_is_known():
  limit = 2e9

  def run_size(size):
    compiled = 12e6 * size
    used = max(1.05 * compiled + 1e8, 3e8)
    known = used if used <= limit else max(compiled, limit + 1)
    return measure.StepMemory("none", int(known), 0, 0, 0, 0.0)

  # Both first sizes take as much, so the line through them is flat.
  search = functools.partial(limits.search_largest, run_size, limit, (4, 8))
  largest = int((limit - 1e8) / (1.05 * 12e6))
  assert search().size == 16
  assert 0.9 * largest < search(miss_share=0.02).size <= largest


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


def test_rows_have_accuracies_and_errors_beside_plain_training(monkeypatch):
  monkeypatch.setitem(accuracy.NETWORKS, "tiny", {"width": 0.25, "repeats": 1})
  options = {"steps": 2, "batch": 64, "seeds": 1, "image": 32}
  console = rich.console.Console(file=io.StringIO())
  with Display(console, steps=2, runs=2) as display:
    results = [
      accuracy.train_network("tiny", case, **options, display=display)
      for case in ("fp32", "int8")
    ]
  assert results[0].error == [0.0]
  assert 0 < results[1].error[0] < 0.05
  made = accuracy.make_rows(results)
  assert {r.experiment for r in made} == {"residuals_accuracy_tiny"}
  (row,) = [r for r in made if r.case == "int8" and r.metric == "test_accuracy"]
  assert row.baseline == results[0].accuracy[0]
  assert row.value == results[1].accuracy[0]
  lines = tables.accuracy_table(made).lines
  assert [line[1] for line in lines] == ["fp32", "int8"]
