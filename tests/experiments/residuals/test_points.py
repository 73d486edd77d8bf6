import json
import subprocess

import jax
import jax.numpy as jnp
import pytest

from experiments import models
from experiments.residuals import cases, measure
from experiments.residuals.networks import NetworkSpec, list_networks
from experiments.residuals.rows import add_plain_ratios, make_point_rows

SPEC = NetworkSpec("tiny", 2)


@pytest.fixture(scope="module")
def points():
  modes = ("plain", "cut_int8", "everything")
  return {mode: measure.measure_point(SPEC, mode, "cpu") for mode in modes}


def build_step(mode):
  return cases.build_step(mode, SPEC.make_network(), SPEC.batch)


def test_modes_save_the_memory_that_they_are_for(points):
  plain, ours = points["plain"].memory, points["cut_int8"].memory
  assert ours.temp_bytes < plain.temp_bytes
  assert ours.argument_bytes == plain.argument_bytes
  assert ours.device_bytes == sum(ours[1:5]) - ours.host_temp_bytes
  # An update in the backward pass returns no gradients.
  param_bytes = 4 * SPEC.make_network().size
  assert plain.result_bytes >= param_bytes
  assert points["everything"].memory.result_bytes < param_bytes / 10


def test_predictions_count_recomputed_operations_and_waits_for_the_host():
  flops = {
    mode: measure.predict_figures(build_step(mode), 0, "cpu").flops
    for mode in ("plain", "cut", "jax_checkpoint")
  }
  assert flops["plain"] <= flops["cut"] < flops["jax_checkpoint"]
  assert flops["jax_checkpoint"] > 1.2 * flops["plain"]
  step = build_step("plain")
  at_once, moved = (
    measure.predict_figures(step, n, "h100") for n in (0, 10**9)
  )
  assert moved.flops == at_once.flops
  assert moved.step_s > at_once.step_s + 0.01


def test_rows_compare_with_plain_and_say_what_was_not_measured(points):
  rows = add_plain_ratios(
    row for point in points.values() for row in make_point_rows(point, "cpu")
  )
  found = {(row.case, row.metric): row for row in rows}
  case = f"{SPEC.case}/cut_int8"
  temp = found[case, "temp_bytes"]
  assert temp.value == points["cut_int8"].memory.temp_bytes
  assert temp.baseline == points["plain"].memory.temp_bytes
  assert temp.ratio == temp.value / temp.baseline
  assert "compiled, not run" in temp.machine
  assert found[case, "step_ms"].value == "not measured: no GPU"
  assert "predicted" in found[case, "step_ms_predicted"].machine


@pytest.mark.parametrize("mode", cases.MODES)
def test_every_mode_is_a_step_of_training(mode):
  step = build_step(mode)
  out = jax.eval_shape(step.fn, *step.args)
  new = out[: len(step.donated)] or out[1:]
  old = step.args[: len(step.donated)] or step.args[:1]
  shapes = [jax.tree.map(jnp.shape, tuple(tree)) for tree in (new, old)]
  assert shapes[0] == shapes[1]


def test_a_step_for_a_gpu_names_the_memory_that_the_compiler_is_told_of(
  monkeypatch, points
):
  # Without the extra `cuda-compile` the host's compiler stands in.
  monkeypatch.setattr(
    "experiments.gpu_compile.compile._lower_program",
    lambda fn, args, gpu, options: jax.jit(fn, **options).lower(*args),
  )
  found = measure.compile_step(build_step("plain"), "h100", 12)
  assert found.machine.startswith(
    "NVIDIA H100 80GB HBM3, 12 GiB: compiled, not"
  )
  on_host = points["plain"].memory
  assert found[1:5] == on_host[1:5]


# What is no network: common/test_shared_flags.py.
def test_unknown_modes_and_targets_are_refused():
  with pytest.raises(ValueError, match="`mode` must be one of"):
    cases.build_step("fast", models.make_network("resnet50"), 1)
  with pytest.raises(ValueError, match="`target` must be one of"):
    measure.compile_step(build_step("plain"), "h300")


def test_all_networks_are_listed():
  with pytest.raises(ValueError, match="`name` must be one of") as caught:
    models.make_network("nothing")
  listed = str(caught.value).partition("one of ")[2].partition(", got")[0]
  assert [name.strip("'") for name in listed.split(", ")] == list_networks()


GPT = {"layers": 2, "length": 8, "heads": 2, "width": 1 / 64, "classes": 16}


@pytest.mark.slow
@pytest.mark.skipif(measure.has_gpu(), reason="there is a GPU")
def test_a_step_runs_in_a_process_of_its_own():
  found = measure.measure_step("gpt", GPT, 2, "everything", steps=2)
  assert (found.reason, found.peak_bytes) == ("", None)  # A host does not say.
  assert found.step_ms > 0


def test_a_step_is_timed_and_a_failure_has_its_reason(monkeypatch):
  def run(command, **_):
    found = measure._time_steps(*json.loads(command[-1]))
    return subprocess.CompletedProcess([], 0, f"a log\n{json.dumps(found)}\n")

  monkeypatch.setattr(subprocess, "run", run)
  assert measure.measure_step("tiny", {}, 2, "update", steps=2).step_ms > 0
  failed = subprocess.CompletedProcess([], 1, "", "Traceback\nError: why\n")
  monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
  assert measure.measure_step("gpt", GPT, 2, "plain").reason == "Error: why"
