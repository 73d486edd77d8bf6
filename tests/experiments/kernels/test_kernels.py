import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import flagsaver

from experiments import gpu_compile
from experiments.common import records, timing
from experiments.kernels import (
  __main__ as command,
  cases,
  check,
  compiled,
  ops as kernels_ops,
  peers,
  rows as kernels_rows,
  run,
  speed as kernels_speed,
  tables,
)
from tests.experiments.jobs import run_module

OPS = ("bfloat16", "truncate2", "int8", "int8_feedback")
SIZE = 1 << 16


@pytest.fixture(scope="module")
def speeds():
  return run.time_all(cases.select_ops(OPS), SIZE, 2, 60)


def test_every_op_is_timed_on_every_size(speeds):
  found = {(s.op, s.size_bytes, s.case) for s in speeds}
  assert found >= {(op, SIZE, "reference") for op in OPS}
  assert ("truncate2", SIZE, "numpy_slices") in found
  for s in speeds:
    assert s.rate > 0
    assert s.copy_rate > 0
    assert s.fraction.value > 0
  assert [s.case for s in speeds if s.is_default] == ["reference"] * len(OPS)


def test_rows_hold_the_ratio_and_what_it_is_made_of(speeds, tmp_path):
  path = tmp_path / "rows.jsonl"
  records.write_rows(path, kernels_rows.make_speed_rows(speeds))
  rows = records.read_rows(path)
  found = {(row.case, row.metric): row for row in rows}
  bandwidth = found["int8/64KiB/reference", "bandwidth"]
  assert (bandwidth.unit, bandwidth.machine) == ("GB/s", records.describe_run())
  (speed,) = (s for s in speeds if (s.op, s.case) == ("int8", "reference"))
  assert (bandwidth.value, bandwidth.baseline) == (speed.rate, speed.copy_rate)
  fraction = found["int8/64KiB/reference", "bandwidth_fraction"]
  assert (fraction.value, fraction.noise) == speed.fraction
  assert found["int8/64KiB/reference", "speedup"].value == 1.0
  assert found["int8/64KiB", "default_implementation"].value == "reference"
  # The table has a line for every row of its size.
  assert len(tables.speed_table(rows, "64KiB").lines) == len(speeds)
  assert len(tables.summary_table(rows).lines) == len(speeds)
  assert not tables.speed_table(rows, "128KiB").lines


def test_what_there_is_no_time_for_is_said():
  speeds = run.time_all(cases.select_ops(OPS[:1]), SIZE, 1, 0)
  assert [s.reason for s in speeds] == ["no time left"]
  (row,) = kernels_rows.make_speed_rows(speeds)
  assert (row.value, row.ratio) == ("not measured: no time left", None)
  (line,) = tables.speed_table([row], "64KiB").lines
  assert line[2:4] == ("not measured", "no time left")


def test_times_slower_than_twice_their_traffic_are_marked():
  fast, slow = (
    kernels_speed.Speed(
      "op", SIZE, name, False, 1.0, 2.0,
      kernels_speed.Ratio(fraction, 0.0), kernels_speed.Ratio(1.0, 0.0),
    )
    for name, fraction in (("reference", 0.6), ("peer", 0.4))
  )  # fmt: skip
  rows = list(kernels_rows.make_speed_rows([fast, slow]))
  floors = [line[4] for line in tables.speed_table(rows, "64KiB").lines]
  assert floors == ["1.67", "2.50 !"]


def test_ops_are_right_in_poisoned_memory():
  ops = cases.select_ops(["int8"])
  outcomes = run.check_all(ops, seed=1, every_case=False)
  assert {o.op for o in outcomes} == {"int8"}
  assert all(o.wrong == 0 and o.values > 0 for o in outcomes)
  assert len(tables.check_table(outcomes, 1).lines) == 1
  rows = list(kernels_rows.make_check_rows(outcomes))
  assert {r.value for r in rows if r.metric == "wrong_values"} == {0}
  assert all(r.value > 0 for r in rows if r.metric == "checked_values")


def test_wrong_values_are_counted_and_missing_ones_have_a_reason():
  def run_op(like, x, *, implementation):
    if implementation == "missing":
      raise NotImplementedError("no such hardware")
    return (x + 1).at[5].add(float(implementation == "wrong"))

  op = kernels_ops.Op("broken", run_op, lambda x: (x,), {})
  outcomes = check.check_op(op, ["wrong", "missing"], seed=0, every_case=False)
  assert {(o.implementation, o.wrong, o.reason) for o in outcomes} == {
    ("wrong", 1, ""),
    ("missing", None, "no such hardware"),
  }


def test_floats_differ_by_sign_and_not_by_kind_of_nan():
  a = np.array([0.0, np.nan, np.inf, 1.0, 1.0], np.float32)
  b = np.array([-0.0, -np.nan, np.inf, 1.0 + 1e-6, 2.0], np.float32)
  assert np.flatnonzero(check._find_different(a, b, 0.0)).tolist() == [0, 3, 4]
  assert np.flatnonzero(check._find_different(a, b, 1e-5)).tolist() == [4]
  tiny, least = np.array([1e-42, -1e-42, 2e-38], np.float32), np.float32(0)
  different = check._find_different(tiny, np.full(3, least), 0.0)
  assert np.flatnonzero(different).tolist() == [1, 2]


@pytest.mark.parametrize("name", ["bfloat16_sum", "int8_feedback"])
def test_ideal_bytes_are_those_of_real_buffers(name):
  op = cases.list_ops()[name]
  x = jnp.ones((2, 4096))
  args = jax.jit(op.make)(x)
  outputs = jax.jit(lambda *args: op.run(x, *args, implementation=None))(*args)
  size = sum(a.nbytes for a in jax.tree.leaves((args, outputs)))
  assert op.ideal_bytes(x) == size


def test_outputs_can_be_those_of_the_last_call():
  x = jax.ShapeDtypeStruct((2, 4096), jnp.float32)
  for name, op in cases.list_ops().items():
    if re.fullmatch("(int|pack|unpack)[123567]", name):
      continue  # Of any number of bits the shapes follow from the same lines.
    args, outputs = op.shapes(x)
    found = jax.eval_shape(op.step(x, "reference"), outputs, *args)
    assert found == outputs, name


def test_an_op_that_feeds_on_its_outputs_is_fed_them():
  op = cases.list_ops()["int8_feedback"]
  x = jnp.linspace(-1, 1, 4096).reshape(1, -1)
  args, (_, outputs) = op.make(x), op.shapes(x)
  step = jax.jit(op.step(x, "reference"), donate_argnums=0, keep_unused=True)
  timed = timing.InPlace(step, outputs, args)
  timed(1)
  first = np.array(timed._last[1])
  timed(1)
  assert not np.array_equal(first, timed._last[1])


def test_peers_do_what_their_names_say():
  x = jnp.linspace(-3, 3, 1 << 16).reshape(-1, 4096)
  for op in cases.list_ops():
    for timed in peers.build_peers(op, x).values():
      timed(2)


def test_figures_are_of_the_kernel_that_moves_most():
  small = gpu_compile.Kernel("small", "fusion", 4, 4, 1, 2)
  large = gpu_compile.Kernel("large", "fusion", 400, 100, 1, 1)
  assembly = [
    gpu_compile.Assembly("a", "small", 32, 0, {4: 1}, {4: 1}, 16, 8),
    gpu_compile.Assembly("b", "large", 128, 0, {16: 4}, {8: 4}, 32, 0),
  ]
  gpu = gpu_compile.find_gpu("H100")
  made = gpu_compile.Compiled(gpu, None, [small, large], assembly)
  found = compiled.summarize(made, 500)
  assert (found.launches, found.spill_bytes) == (3, 8)
  assert found.traffic_ratio == 516 / 500
  assert (found.registers, found.loads, found.stores) == (32, {16: 4}, {8: 4})
  # A loop that runs unknown times has no traffic.
  loop = gpu_compile.Compiled(gpu, None, [small._replace(runs=None)], [])
  assert compiled.summarize(loop, 500).traffic_ratio is None


def test_compiled_rows_say_that_nothing_ran():
  figures = compiled.Figures(1, 1.0, 0, None, None, {16: 4}, {4: 1, 8: 2})
  found = [("int8", "pallas_triton", figures), ("int8", "reference", "no")]
  rows = list(kernels_rows.make_compiled_rows(found, "H100"))
  assert {row.machine for row in rows} == {"H100: compiled, not run"}
  values = {row.metric: row.value for row in rows[:-1]}
  assert values["traffic_ratio_compiled"] == 1.0
  assert values["registers_compiled"] == "unknown"
  assert values["stores_compiled"] == "1x4 2x8"
  assert rows[-1].value == "none: no"
  first, last = tables.compiled_table(rows).lines
  assert first[2:] == ("1", "1.00", "0", "?", "?", "4x16", "1x4 2x8")
  assert last[2] == "none" and last[7] == "no"


def test_kernels_are_compiled_for_a_gpu_or_refused_with_a_reason(tmp_path):
  if gpu_compile.explain_refusal() is not None:
    refusal = pytest.raises(SystemExit, match="Nothing can be compiled for")
    with flagsaver.flagsaver(compiled=True, target="H100"), refusal:
      command.main()
    return
  path = tmp_path / "rows.jsonl"
  done = run_module(
    "kernels", "--compiled", "--ops=pack3,int8", f"--json={path}"
  )
  assert done.returncode == 0, done.stderr
  rows = records.read_rows(path)
  found = {(row.case, row.metric): row.value for row in rows}
  for op in ("pack3", "int8"):
    assert found[f"{op}/pallas_triton", "launches_compiled"] == 1
    assert found[f"{op}/pallas_triton", "traffic_ratio_compiled"] == 1.0
  assert found["int8/reference", "traffic_ratio_compiled"] > 1.5
