import jax
import pytest

from experiments.common.console import JobError
from experiments.weights import cases
from jaxmotion import controllers, wire

LIKE = jax.ShapeDtypeStruct((512, 512), "float32")


@pytest.mark.parametrize("name", cases.CASES)
def test_a_rung_has_the_bits_it_is_said_to(name):
  case = cases.get_case(name)
  for codec, bits in zip(case.weights, case.bits, strict=True):
    moved = wire.payload_bytes(codec, LIKE) * 8 / LIKE.size
    assert bits <= moved < bits + 0.3  # Scales of blocks.


def test_a_misspelt_case_is_named():
  with pytest.raises(JobError, match=r"`config.cases` must .*got 'int7'"):
    cases.get_case("int7")


@pytest.mark.parametrize(
  ("config", "threshold"),
  [
    ("weights_alexnet", -5e-2),
    ("weights_vgg", -2e-3),
    ("weights_resnet", -2e-5),
  ],
)
def test_awp_has_the_papers_threshold_and_the_runs_interval(
  load_config, config, threshold
):
  config = load_config(config)
  controller = cases.make_controller(cases.get_case("awp"), config)
  assert controller.threshold == threshold
  assert controller.interval == config.awp_interval


def test_static_cases_stay_where_they_are(load_config):
  config = load_config("weights_vgg")
  controller = cases.make_controller(cases.get_case("int8"), config)
  assert controller == controllers.fixed(0)
