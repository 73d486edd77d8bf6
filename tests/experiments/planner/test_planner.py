import functools

import pytest

from experiments.common import records
from experiments.common.console import JobError
from experiments.common.files import FileError
from experiments.common.tables import index_rows
from experiments.planner import links, run
from experiments.planner.rows import links_table
from jaxmotion import codecs, perfmodel, planner
from tests.experiments.jobs import run_module


def test_a_configuration_has_its_workers_optimizer_and_gradient(
  tiny, monkeypatch
):
  # Errors are measured for each candidate and tensor: one candidate is fast.
  advise = functools.partial(
    planner.advise, candidates=[codecs.uniform(bits=8)]
  )
  monkeypatch.setattr(run.planner, "advise", advise)
  config = tiny("digits", channels=(4,), hidden=4)
  plan = run.make_plan(config, perfmodel.builtin_platform("ethernet_1gbit"))
  assert plan.platform.axis("data").workers == config.workers
  # Nesterov's momentum and decay: more than plain gradient descent.
  assert plan.problem.step_cost.state_bytes > 0
  assert [choice.path for choice in plan.choices] == [
    f"{layer}/{leaf}"
    for layer in ("convs/0", "hidden", "out")
    for leaf in ("bias", "kernel")
  ]
  assert plan.problem.errors.is_measured
  assert 0 < plan.error <= 0.1


def test_a_plan_is_printed_and_written(tmp_path, tiny):
  config, json = tiny("digits"), tmp_path / "rows.jsonl"
  path = tmp_path / "link.json"
  perfmodel.save_platform(perfmodel.builtin_platform("ethernet_10gbit"), path)
  fields = ("channels", "hidden", "workers", "batch_size")
  done = run_module(
    "planner",
    "--config=configs/digits.py",
    *(f"--config.{name}={config[name]}" for name in fields),
    f"--platform={path}",
    "--nogradients",
    "--accuracy_budget=0.01",
    f"--json={json}",
  )
  assert done.returncode == 0, done.stderr
  assert "digits on ethernet_10gbit, predicted" in done.stdout
  assert "convs/0/kernel" in done.stdout and "codec: " in done.stdout
  assert "\x1b[" not in done.stdout
  rows = records.read_rows(json)
  assert {row.experiment for row in rows} == {"planner_digits"}
  steps = {r.case: r for r in rows if r.metric == "step_ms_predicted"}
  assert {"plan", "identity()", "uniform(bits=8)"} <= set(steps)
  assert steps["identity()"].ratio == 1 and steps["plan"].ratio <= 1
  sent = {r.case: r.value for r in rows if r.metric == "wire_bytes_predicted"}
  assert sent.pop("plan") == pytest.approx(sum(sent.values()))
  assert all(row.machine == "ethernet_10gbit" for row in rows)


def test_unknown_platforms_workers_and_axes_are_refused(tiny, tmp_path):
  with pytest.raises(
    FileError, match="`--platform` must be one of 'h200_node'"
  ):
    run.load_platform("token_ring")
  path = tmp_path / "cut.json"
  for text in ("", "{}", '{"name": 3}'):
    path.write_text(text)
    with pytest.raises(FileError, match="`--platform` must be .*cut.json"):
      run.load_platform(str(path))
  with pytest.raises(JobError, match="multiple of the 3 workers, got 8"):
    run.make_plan(
      tiny("digits", workers=3), perfmodel.builtin_platform("h100_node")
    )
  with pytest.raises(JobError, match="`--mesh_axis` must be one of 'host'"):
    run.make_plan(tiny("digits"), perfmodel.builtin_platform("h100_cluster"))


@pytest.fixture(scope="module")
def rows():
  return links.predict_network(
    "gpt", 1, 0.5, layers=2, width=0.25, length=32, heads=4
  )


def test_a_plan_is_never_slower_than_no_compression(rows):
  steps = [row for row in rows if row.metric == "step_ms_predicted"]
  assert len(steps) == len(links.LINKS)
  assert all(row.value <= row.baseline for row in steps)


def test_the_slower_the_link_the_more_the_plan_gains(rows):
  ratios = [row.ratio for row in rows if row.metric == "step_ms_predicted"]
  assert ratios[0] < 0.7 < ratios[-1]
  assert sorted(ratios[1:]) == ratios[1:]


def test_a_step_without_exchange_is_the_same_on_all_links(rows):
  times = {row.value for row in rows if row.metric == "compute_ms_predicted"}
  assert max(times) == pytest.approx(min(times))


def test_a_slower_device_takes_longer(rows):
  slow = links.make_platform(links.LINKS["NVLink"], 0.1).device
  fast = links.make_platform(links.LINKS["NVLink"], 0.5).device
  for dtype, rate in fast.matmul_flops_per_s.items():
    assert slow.matmul_flops_per_s[dtype] == pytest.approx(rate / 5)


def test_the_table_has_a_line_for_each_link(rows):
  lines = links_table(rows).lines
  assert [line[1] for line in lines] == list(links.LINKS)
  plans = index_rows(rows)
  assert lines[0][-1] == plans[rows[0].case, "plan"].value
