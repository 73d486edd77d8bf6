import functools

import pytest

from experiments.common.console import JobError
from experiments.common.files import FileError
from experiments.planner import links, run
from jaxmotion import codecs, perfmodel, planner


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


# By the library that reads the default configuration.
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_a_plan_is_printed_and_written(tmp_path, tiny, run_main):
  from experiments.planner import __main__ as command

  path = tmp_path / "link.json"
  perfmodel.save_platform(perfmodel.builtin_platform("ethernet_10gbit"), path)
  given = {"platform": str(path), "gradients": False, "accuracy_budget": 0.01}
  rows, printed = run_main(command.main, config=tiny("digits"), **given)
  assert "digits on ethernet_10gbit, predicted" in printed
  assert "convs/0/kernel" in printed and "codec: " in printed
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


def test_the_slower_the_link_the_more_the_plan_gains(monkeypatch):
  some = [*list(links.LINKS)[::2], "NVLink"]
  monkeypatch.setattr(
    links, "LINKS", {name: links.LINKS[name] for name in some}
  )
  rows = links.predict_network(
    "gpt", 1, 0.5, layers=1, width=0.25, length=32, heads=4
  )
  steps = [row for row in rows if row.metric == "step_ms_predicted"]
  assert len(steps) == len(links.LINKS)
  # A plan is never slower than no compression.
  assert all(row.value <= row.baseline for row in steps)
  ratios = [row.ratio for row in steps]
  assert ratios[0] < 0.7 < ratios[-1]
  assert sorted(ratios[1:]) == ratios[1:]
  # A step without exchange is the same on all links.
  times = {row.value for row in rows if row.metric == "compute_ms_predicted"}
  assert max(times) == pytest.approx(min(times))


def test_a_slower_device_takes_longer():
  slow = links.make_platform(links.LINKS["NVLink"], 0.1).device
  fast = links.make_platform(links.LINKS["NVLink"], 0.5).device
  for dtype, rate in fast.matmul_flops_per_s.items():
    assert slow.matmul_flops_per_s[dtype] == pytest.approx(rate / 5)
