import signal
import subprocess
import sys
import time

import pytest

from experiments.common import records
from experiments.hosts import links
from tests.experiments.jobs import run_module
from tests.paths import ROOT

REFUSAL = links.explain_refusal()
SMALL = ["--widths=64,4096,10", "--batch=4", "--steps=2", "--rounds=2"]
WAIT_S = 120


def command(*flags):
  return [sys.executable, "-m", "experiments.hosts", *SMALL, *flags]


def run(*flags, **variables):
  return run_module("hosts", *SMALL, *flags, **variables)


def read(path):
  rows = records.read_rows(path)
  return rows[0].experiment, {(r.case, r.metric): r.value for r in rows}


def test_hosts_without_a_link_need_no_permission(tmp_path):
  json, plot = tmp_path / "rows.jsonl", tmp_path / "plot.png"
  done = run(
    "--rate=loopback",
    "--optimizer=adamw",
    "--cases=none,fp32,sign_feedback",
    "--peers=",
    f"--json={json}",
    f"--plot={plot}",
  )
  assert done.returncode == 0, done.stderr
  experiment, values = read(json)
  assert experiment == "hosts_2_loopback_adamw"
  # The loopback interface also counts what other programs send.
  predicted = "wire_bytes_predicted"
  assert values["fp32", predicted] > 10 * values["sign_feedback", predicted]
  for case in ("fp32", "sign_feedback"):
    assert values[case, "wire_bytes_counted"] > 0.9 * values[case, predicted]
  assert plot.read_bytes().startswith(b"\x89PNG")
  assert "what the link allows" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
def test_counted_bytes_of_three_hosts_are_those_predicted(tmp_path):
  json = tmp_path / "rows.jsonl"
  done = run(
    "--rate=none",
    "--hosts=3",
    "--cases=none,int8",
    "--peers=",
    f"--json={json}",
  )
  assert done.returncode == 0, done.stderr
  _, values = read(json)
  assert_bytes_are_the_predicted(values, ["int8"])
  assert values["none", "interface_bytes"] < 1000


def assert_bytes_are_the_predicted(values, cases):
  """Counted and predicted bytes differ by less than 3 percent."""
  for case in cases:
    counted = values[case, "wire_bytes_counted"]
    assert counted == pytest.approx(
      values[case, "wire_bytes_predicted"], rel=0.03, abs=4096
    )


@pytest.mark.slow
@pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
def test_a_slow_link_makes_fewer_bytes_faster_and_counts_those_predicted(
  tmp_path,
):
  cases = ["fp32", "bf16", "int8", "int4_feedback", "sharded_int4"]
  json = tmp_path / "rows.jsonl"
  done = run(
    "--rate=50mbit",
    "--rtt_ms=2",
    f"--cases=none,{','.join(cases)}",
    "--peers=torch_fp32",
    f"--json={json}",
  )
  assert done.returncode == 0, done.stderr
  experiment, values = read(json)
  assert experiment == "hosts_2_50mbit_rtt2ms"
  # 4x fewer bytes; the link alone takes 190 ms for those of fp32.
  assert values["int8", "speedup"] > 1.5
  assert values["int8", "ideal_ratio"] > 0.8
  assert_bytes_are_the_predicted(values, cases)


@pytest.mark.slow
@pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
def test_an_ended_run_leaves_no_namespaces_behind():
  process = subprocess.Popen(
    command("--peers=", "--rounds=100000"),
    cwd=ROOT,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  name = f"jaxmotion-{process.pid}-"
  deadline = time.monotonic() + WAIT_S
  seen = 0
  # The first ones are those of the question whether any can be made.
  while seen < 10 and time.monotonic() < deadline:
    time.sleep(0.1)
    seen = seen + 1 if name in listed() else 0
  assert name in listed()
  process.send_signal(signal.SIGTERM)
  assert process.wait(WAIT_S) == 128 + signal.SIGTERM
  assert name not in listed()


def listed():
  return subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout


def test_where_links_cannot_be_made_it_says_so_and_ends_well(tmp_path):
  done = run("--cases=fp32", PATH=str(tmp_path))
  assert done.returncode == 0, done.stderr
  assert "Not measured" in done.stdout and "not installed" in done.stdout


def test_a_run_without_any_case_is_refused():
  done = run("--cases=", "--peers=")
  assert done.returncode == 1
  assert "`--cases` or `--peers` must name a case" in done.stderr
