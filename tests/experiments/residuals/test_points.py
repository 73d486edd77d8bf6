import jax
import numpy as np
import pytest

from experiments import models
from experiments.residuals import cases, measure, points as residuals_points

TINY = {"blocks": (1, 3, 1, 1), "image": 32, "classes": 10, "width": 1 / 16}
SPEC = residuals_points.Spec("resnet", 2, TINY)


@pytest.fixture(scope="module")
def points():
  modes = ("plain", "cut_int8", "everything")
  return {mode: residuals_points.find(SPEC, mode, "cpu") for mode in modes}


def test_what_is_kept_is_less_than_plain_keeps(points):
  plain, ours = points["plain"].memory, points["cut_int8"].memory
  assert ours.temp_bytes < plain.temp_bytes
  assert ours.argument_bytes == plain.argument_bytes
  assert ours.device_bytes == sum(ours[1:5]) - ours.host_temp_bytes


def test_an_update_in_the_backward_pass_returns_no_gradients(points):
  sizes = [p.size for p in jax.tree.leaves(SPEC.make().params)]
  assert points["plain"].memory.result_bytes >= 4 * sum(sizes)
  assert points["everything"].memory.result_bytes < 4 * sum(sizes) / 10


def test_what_is_computed_again_is_predicted():
  flops = {
    mode: measure.predict(cases.job(mode, SPEC.make(), 2), 0, "cpu").flops
    for mode in ("plain", "cut", "jax_checkpoint")
  }
  assert flops["plain"] <= flops["cut"] < flops["jax_checkpoint"]
  assert flops["jax_checkpoint"] > 1.2 * flops["plain"]


def test_what_waits_for_the_host_takes_time():
  job = cases.job("plain", SPEC.make(), 2)
  at_once, moved = (measure.predict(job, n, "h100") for n in (0, 10**9))
  assert moved.flops == at_once.flops
  assert moved.step_s > at_once.step_s + 0.01


def test_rows_compare_with_plain_and_say_what_was_not_measured(points):
  rows = list(residuals_points.rows("test", list(points.values()), "cpu"))
  found = {(row.case, row.metric): row for row in rows}
  case = f"{SPEC.case}/cut_int8"
  temp = found[case, "temp_bytes"]
  assert temp.value == points["cut_int8"].memory.temp_bytes
  assert temp.baseline == points["plain"].memory.temp_bytes
  assert temp.ratio == temp.value / temp.baseline
  assert "compiled, not run" in temp.machine
  assert found[case, "step_ms"].value == "not measured: no GPU"
  assert "predicted" in found[case, "step_ms_predicted"].machine


def test_what_is_kept_exactly_makes_the_same_loss():
  params = SPEC.make().init(jax.random.key(0))
  x = jax.random.normal(jax.random.key(1), (2, 32, 32, 3))
  labels = np.array([1, 2])
  want, plain = (
    jax.jit(cases.job(mode, SPEC.make(), 2).fn)(params, (x, labels))
    for mode in ("cut", "plain")
  )
  np.testing.assert_allclose(want[0], plain[0], rtol=1e-6)
  for a, b in zip(
    jax.tree.leaves(want[1]), jax.tree.leaves(plain[1]), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("mode", list(cases.MODES))
def test_every_mode_is_a_step_of_training(mode):
  job = cases.job(mode, SPEC.make(), 2)
  out = jax.eval_shape(job.fn, *job.args)
  new = out[: len(job.donated)] or out[1:]
  old = job.args[: len(job.donated)] or job.args[:1]
  same = jax.tree.map(lambda a, b: a.shape == b.shape, tuple(new), tuple(old))
  assert all(jax.tree.leaves(same))


def test_a_mode_or_a_network_that_is_none_is_an_error():
  with pytest.raises(ValueError, match="`mode` must be one of"):
    cases.job("fast", models.make_network("resnet50"), 1)
  for text in ("gpt", "gpt:x", "gpt:8:layers", "gpt:8:layers=a"):
    with pytest.raises(ValueError, match="`networks` must be NAME:BATCH or"):
      residuals_points.parse([text])
  with pytest.raises(ValueError, match="`target` must be one of"):
    measure.compile_step(cases.job("plain", SPEC.make(), 2), "h300")
