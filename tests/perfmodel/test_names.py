"""Names that nothing would look up are refused, not ignored."""

import dataclasses

import jax
import pytest

from jaxmotion import perfmodel
from jaxmotion.perfmodel._names import COLLECTIVES
from jaxmotion.perfmodel.predict._collectives import _TRAFFIC, ALGORITHMS

PLATFORM = perfmodel.builtin_platform("ethernet_1gbit")
LINK, DEVICE = PLATFORM.axes[0].link, PLATFORM.device
GRADS = jax.ShapeDtypeStruct((1024,), "float32")
CURVE = perfmodel.Curve(sizes=(1.0, 2.0), seconds=(1.0, 2.0), noise=0.0)


def test_names_of_collectives_are_those_that_have_traffic():
  assert set(COLLECTIVES) == {op for op, _ in _TRAFFIC}
  assert set(ALGORITHMS) == {algorithm for _, algorithm in _TRAFFIC}


def test_a_misspelt_algorithm_is_refused():
  for algorithm in ("ring", "tree", "halving_doubling"):
    perfmodel.predict_exchange(GRADS, PLATFORM, "data", algorithm=algorithm)
  with pytest.raises(ValueError, match="`algorithm` must be one of .*'treee'"):
    perfmodel.predict_exchange(GRADS, PLATFORM, "data", algorithm="treee")


def test_an_efficiency_of_no_collective_is_refused():
  with pytest.raises(ValueError, match=r"`efficiency\['all_redcue'\]` must be"):
    dataclasses.replace(LINK, efficiency={"all_redcue": 0.1})
  plain = perfmodel.platform_to_dict(PLATFORM)
  plain["axes"][0]["link"]["efficiency"] = {"all_redcue": 0.1}
  with pytest.raises(ValueError, match=r"axes\[0\].*efficiency\['all_redcue'"):
    perfmodel.platform_from_dict(plain)


@pytest.mark.parametrize(
  "name", ["all_redcue 4", "all_reduce", "all_reduce four", "all_reduce -4"]
)
def test_a_curve_of_no_collective_is_refused(name):
  dataclasses.replace(LINK, measured={"all_reduce 4": CURVE})
  with pytest.raises(ValueError, match="`measured.* must be a collective and"):
    dataclasses.replace(LINK, measured={name: CURVE})


@pytest.mark.parametrize(
  "name", ["matmul", "matmul flaot32", "matmul f4", "elementwize", "decode"]
)
def test_a_curve_of_no_kernel_is_refused(name):
  good = ("matmul bfloat16", "reduction", "encode sign(block=1024)")
  dataclasses.replace(DEVICE, measured=dict.fromkeys(good, CURVE))
  with pytest.raises(ValueError, match="`measured.* must be"):
    dataclasses.replace(DEVICE, measured={name: CURVE})


def test_a_rate_of_no_dtype_is_refused():
  with pytest.raises(ValueError, match="`matmul_flops_per_s.* of a dtype, got"):
    dataclasses.replace(DEVICE, matmul_flops_per_s={"flaot32": 1e12})


def test_an_axis_needs_a_link():
  with pytest.raises(TypeError, match="`link` must be a Link, got None"):
    perfmodel.Axis(name="data", workers=2, link=None)


def test_a_platform_without_a_host_is_written_and_read():
  alone = dataclasses.replace(
    PLATFORM, to_host=None, from_host=None, sources={}
  )
  plain = perfmodel.platform_to_dict(alone)
  assert perfmodel.platform_from_dict(plain) == alone
