import jax
import numpy as np
import pytest

from experiments import models
from experiments.common.console import JobError
from experiments.perfmodel.reference import reference_network
from experiments.perfmodel.sweep import NETWORKS
from experiments.residuals import cases, measure, measure as residuals_points
from experiments.residuals.networks import (
  NetworkSpec,
  check_model,
  list_networks,
  parse_network,
)
from experiments.residuals.rows import add_plain_ratios, make_point_rows

SPEC = NetworkSpec("tiny", 2)


@pytest.fixture(scope="module")
def points():
  modes = ("plain", "cut_int8", "everything")
  return {
    mode: residuals_points.measure_point(SPEC, mode, "cpu") for mode in modes
  }


def build_step(mode):
  return cases.build_step(mode, SPEC.make_network(), SPEC.batch)


def test_compressed_residuals_are_smaller_than_plain_ones(points):
  plain, ours = points["plain"].memory, points["cut_int8"].memory
  assert ours.temp_bytes < plain.temp_bytes
  assert ours.argument_bytes == plain.argument_bytes
  assert ours.device_bytes == sum(ours[1:5]) - ours.host_temp_bytes


def test_an_update_in_the_backward_pass_returns_no_gradients(points):
  sizes = [p.size for p in jax.tree.leaves(SPEC.make_network().params)]
  assert points["plain"].memory.result_bytes >= 4 * sum(sizes)
  assert points["everything"].memory.result_bytes < 4 * sum(sizes) / 10


def test_recomputed_operations_are_in_the_predicted_flops():
  flops = {
    mode: measure.predict_figures(build_step(mode), 0, "cpu").flops
    for mode in ("plain", "cut", "jax_checkpoint")
  }
  assert flops["plain"] <= flops["cut"] < flops["jax_checkpoint"]
  assert flops["jax_checkpoint"] > 1.2 * flops["plain"]


def test_a_step_that_waits_for_the_host_takes_longer():
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


def test_lossless_modes_have_the_same_loss_and_gradient():
  params = SPEC.make_network().init(jax.random.key(0))
  x = jax.random.normal(jax.random.key(1), (2, 32, 32, 3))
  labels = np.array([1, 2])
  ours, plain = (
    jax.jit(build_step(mode).fn)(params, (x, labels))
    for mode in ("cut", "plain")
  )
  np.testing.assert_allclose(ours[0], plain[0], rtol=1e-6)
  for a, b in zip(
    jax.tree.leaves(ours[1]), jax.tree.leaves(plain[1]), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("mode", list(cases.MODES))
def test_every_mode_is_a_step_of_training(mode):
  step = build_step(mode)
  out = jax.eval_shape(step.fn, *step.args)
  new = out[: len(step.donated)] or out[1:]
  old = step.args[: len(step.donated)] or step.args[:1]
  same = jax.tree.map(lambda a, b: a.shape == b.shape, tuple(new), tuple(old))
  assert all(jax.tree.leaves(same))


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


def test_unknown_modes_networks_and_targets_are_refused():
  with pytest.raises(ValueError, match="`mode` must be one of"):
    cases.build_step("fast", models.make_network("resnet50"), 1)
  for text in ("gpt", "gpt:", "gpt:x", "gpt:0", "gpt:-8", "gpt:8.5"):
    with pytest.raises(ValueError, match="must be NAME:BATCH or"):
      parse_network(text)
  near = "NAME must be one of .* got 'alexnett'; did you mean 'alexnet'"
  with pytest.raises(ValueError, match=near):
    parse_network("alexnett:8")
  near = "OPTION of gpt must be one of .* 'layer'; did you mean 'layers'"
  with pytest.raises(ValueError, match=near):
    parse_network("gpt:8:layer=3")
  for text in ("gpt:8:layers", "gpt:8:layers=a", "gpt:8:layers=0"):
    with pytest.raises(ValueError, match="layers of gpt must be a positive"):
      parse_network(text)
  with pytest.raises(ValueError, match="can be made, got 'resnet50:8:image=1'"):
    parse_network("resnet50:8:image=1")
  with pytest.raises(ValueError, match="`target` must be one of"):
    measure.compile_step(build_step("plain"), "h300")


def list_choices(call):
  """Returns the names that an error of a function lists."""
  with pytest.raises(ValueError, match="`name` must be one of") as caught:
    call("nothing")
  listed = str(caught.value).partition("one of ")[2].partition(", got")[0]
  return [name.strip("'") for name in listed.split(", ")]


def test_all_networks_are_listed():
  assert list_choices(models.make_network) == list_networks()
  assert list_choices(reference_network) == list(NETWORKS)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("lstm", "NAME must be one of gpt, .* got 'lstm'"),
    ("gpt:layer=3", "OPTION of gpt must be .* 'layer'; did you mean 'layers'"),
    ("mlp_relu:kind=1", "must be one of blocks, .* 'kind'"),
    ("gpt:layers", "layers of gpt must be a positive number, true or"),
    ("gpt:layers=0", "layers of gpt must be a positive number, true or"),
    ('gpt:layers="a"', "layers of gpt must be a positive number, true or"),
    ("gpt:layers=NaN", "layers of gpt must be a positive number, true or"),
    ("resnet50:image=1", "that can be made, got 'resnet50:image=1': "),
  ],
)
def test_a_model_that_cannot_be_made_is_refused(text, message):
  with pytest.raises(JobError, match=message) as caught:
    check_model(text)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["gpt", "gpt:layers=2:flash=true"])
def test_a_model_that_can_be_made_stays(text):
  assert check_model(text) == text


GPT = {"layers": 2, "length": 8, "heads": 2, "width": 1 / 64, "classes": 16}


@pytest.mark.skipif(residuals_points.has_gpu(), reason="there is a GPU")
def test_a_step_runs_in_a_process_of_its_own():
  found = residuals_points.measure_step("gpt", GPT, 2, "everything", steps=2)
  assert found.reason == ""
  assert found.step_ms > 0
  assert found.peak_bytes is None  # A host does not say.


def test_a_failed_measurement_has_its_reason():
  found = residuals_points.measure_step("gpt", GPT, 2, "fast", steps=1)
  assert "`mode` must be one of" in found.reason
