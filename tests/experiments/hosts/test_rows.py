import os

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from experiments.hosts.cases import (
  CARRIERS,
  check_case,
  is_carrier,
  make_carrier,
)
from experiments.hosts.rows import byte_table, floor_ms, ideal_ms, make_rows
from experiments.hosts.run import Result, Setting


def result(case, step_ms, sent, predicted=None):
  return Result(case, step_ms, 0.5, 30.0, sent, 0.9 * sent, predicted)


NONE, FP32 = result("none", 40.0, 0.0, 0), result("fp32", 440.0, 4e7, 4e7)
INT8 = result("int8", 150.0, 1e7, 1e7)


def test_the_ideal_shortens_the_exchange_and_nothing_else():
  assert ideal_ms(INT8, NONE, FP32, 0.0) == 40 + 400 / 4
  assert ideal_ms(INT8, NONE, FP32, 20.0) == 40 + 20 + 380 / 4
  # A step without exchange that is slower than one with it: noise.
  assert ideal_ms(INT8, NONE, FP32._replace(step_ms=30.0), 0.0) == 40


def test_a_perfect_overlap_leaves_the_link_or_the_cores(monkeypatch):
  monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
  setting = Setting(hosts=2, rate="1gbit")
  assert floor_ms(INT8, setting) == 80  # 10 MB at 125 MB/s.
  assert floor_ms(NONE, setting) == 30
  assert floor_ms(INT8, setting._replace(hosts=8)) == 120
  for rate in ("none", "loopback"):
    assert floor_ms(INT8, setting._replace(rate=rate)) == 30


def test_rows_hold_what_was_measured_and_what_follows():
  peer = result("torch_fp16", 220.0, 2e7)
  rows = make_rows([NONE, FP32, INT8, peer], Setting(rate="1gbit"))
  found = {(r.case, r.metric): r for r in rows}
  assert found["int8", "speedup"].value == pytest.approx(440 / 150)
  assert found["int8", "wire_ratio"].value == 4
  assert found["int8", "ideal_ratio"].value == pytest.approx(150 / 140)
  assert found["int8", "step_ms"].noise == 0.5
  assert found["torch_fp16", "ideal_ratio"].value == pytest.approx(220 / 240)
  assert ("torch_fp16", "wire_bytes_predicted") not in found
  assert ("none", "speedup") not in found
  assert {r.experiment for r in rows} == {"hosts_2_1gbit"}
  units = {r.metric: r.unit for r in rows}
  assert units["step_ms"] == "ms" and units["interface_bytes"] == "bytes"


def test_what_follows_is_left_out_without_its_baseline():
  metrics = {r.metric for r in make_rows([INT8], Setting())}
  assert not metrics & {"speedup", "wire_ratio", "ideal_ratio"}
  metrics = {r.metric for r in make_rows([FP32, INT8], Setting())}
  assert "speedup" in metrics and "ideal_ratio" not in metrics


def test_a_case_that_slows_the_step_is_marked():
  slow = result("sign", 500.0, 1e6, 1e6)
  rows = make_rows([NONE, FP32, INT8, slow], Setting())
  marks = [line[-1] for line in byte_table(rows).lines]
  assert [bool(mark) for mark in marks] == [False, False, False, True]


HOSTS = 3
MESH = Mesh(
  np.array(jax.devices()[:HOSTS]), ("data",), axis_types=(AxisType.Auto,)
)


def test_turns_of_one_row_receive_what_an_all_to_all_receives():
  found = {}
  for kind in ("alltoall", "shifts"):
    send, words = make_carrier(MESH, f"carry_{kind}_1kib")
    own = np.arange(words.size, dtype=np.uint32).reshape(words.shape)
    rows = np.asarray(send(own)).reshape(HOSTS, HOSTS, -1)
    # A host's rows in the order in which they arrive.
    found[kind] = [sorted(map(tuple, host)) for host in rows]
  assert found["alltoall"] == found["shifts"]


@pytest.mark.parametrize("kind", CARRIERS)
def test_hosts_send_the_bytes_of_the_name(kind):
  _, words = make_carrier(MESH, f"carry_{kind}_12kib")
  per_host = words.nbytes / HOSTS
  share = {"sum": 4 / 3, "gather": 2, "alltoall": 2 / 3, "shifts": 2 / 3}[kind]
  np.testing.assert_allclose(per_host * share, 12 * 1024)


def test_names_that_are_no_collectives_are_refused():
  assert check_case("carry_sum_64kib")
  assert not is_carrier("carry_swap_64kib")
  with pytest.raises(ValueError, match="got 'carry_swap_64kib'"):
    check_case("carry_swap_64kib")
