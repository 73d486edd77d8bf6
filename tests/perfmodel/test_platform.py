import copy
import dataclasses
import math

import jax.numpy as jnp
import pytest

from experiments.train.cases import EXCHANGES
from jaxmotion import perfmodel
from jaxmotion.codecs import identity
from jaxmotion.codecs.extend import partition
from jaxmotion.perfmodel import _collectives, _platform, gbit_per_s, gbyte_per_s

NAMES = [
  *("h200_node", "h100_node", "a100_node", "h100_cluster"),
  *(f"ethernet_{gbit}gbit" for gbit in (1, 10, 25, 100)),
]
LINK = perfmodel.Link(latency_s=1e-5, rate=gbit_per_s(10))
SLOW = dataclasses.replace(LINK, latency_s=3.6e-3)
AXIS = perfmodel.Axis(name="data", workers=2, link=LINK)
PLATFORM = perfmodel.builtin_platform("ethernet_1gbit")
DEVICE, RATES = PLATFORM.device, "matmul_flops_per_s"
CURVE = perfmodel.Curve(sizes=(1.0, 2.0), seconds=(1.0, 2.0), noise=0.0)


def test_every_figure_of_a_builtin_platform_has_a_source():
  # Fields with a default are options or measurements, not figures.
  choices = (".call_s", ".shared_by", ".efficiency", ".measured")
  for name in NAMES:
    platform = perfmodel.builtin_platform(name)
    figures = {f for f in platform.figure_paths() if not f.endswith(choices)}
    assert platform.name == name and set(platform.sources) == figures
    assert all(platform.sources.values())


def test_cpu2_was_measured_with_curves_of_all_exchanges():
  platform = perfmodel.builtin_platform("cpu2")
  for path, source in platform.sources.items():
    assert source.startswith("measured 2"), path
    assert "2 emulated devices" in source
  device, link = platform.device, platform.axis("data").link
  tree = {"kernel": jnp.zeros((64, 64)), "bias": jnp.zeros(64)}
  for exchange in EXCHANGES.values():
    for part in partition(exchange, tree).leaf_groups:
      if part.codec != identity():
        assert f"encode {part.codec!r}" in device.measured
  assert {"all_reduce 2", "all_gather 2"} <= set(link.measured)


def test_a_rate_has_a_unit_and_a_range():
  assert gbit_per_s(8) == gbyte_per_s(1)
  for rate in (1e9, 10, "10 Gbit/s", None):
    with pytest.raises(TypeError, match=r"`rate` must be .*bits or bytes\?"):
      dataclasses.replace(LINK, rate=rate)
    with pytest.raises(TypeError, match=r"`memory_rate`.*bits or bytes\?"):
      dataclasses.replace(DEVICE, memory_rate=rate)
  for gbit in (1e9, 1e-6, 8e-5):
    with pytest.raises(ValueError, match="`rate` must be between.*these bits"):
      dataclasses.replace(LINK, rate=gbit_per_s(gbit))


def test_a_long_link_is_slow_or_measured():
  wan = dataclasses.replace(SLOW, rate=gbit_per_s(1))
  busy = dataclasses.replace(SLOW, measured={"all_reduce 2": CURVE})
  for link in (wan, busy):
    assert dataclasses.replace(AXIS, link=link).link.latency_s == 3.6e-3


@pytest.mark.parametrize(
  ("part", "field", "value", "hint"),
  [
    (DEVICE, "vector_flops_per_s", 989.0, "not GFLOP/s or TFLOP/s"),
    (DEVICE, RATES, {"bfloat16": 989.0}, "not GFLOP/s or TFLOP/s"),
    (DEVICE, RATES, {"float32": math.nan}, "got nan"),
    (DEVICE, RATES, {"flaot32": 1e12}, "of a dtype, got"),
    (DEVICE, "memory_bytes", 80.0, "not GB"),
    (DEVICE, "kernel_s", 5.0, "not microseconds"),
    (LINK, "latency_s", 50.0, "not microseconds"),
    # Of microseconds that were taken for nanoseconds, say.
    (AXIS, "link", SLOW, "latency_s` must be .*0.002], got 0.0036. .* seconds"),
    (LINK, "efficiency", {"all_gather": 1.5}, "got 1.5"),
    (LINK, "efficiency", {"all_gather": 0}, "got 0"),
    (LINK, "efficiency", {"all_redcue": 0.1}, r"'all_redcue'\]` must be"),
    *(
      (LINK, "measured", {f"all_{name}": CURVE}, "must be a collective and")
      for name in ("redcue 4", "reduce", "reduce four", "reduce -4")
    ),
    *(
      (DEVICE, "measured", {name: CURVE}, r"\]` must be")
      for name in ("matmul", "matmul flaot32", "elementwize", "decode")
    ),
    # Another name of float32, by which no curve would be found.
    (DEVICE, "measured", {"matmul f4": CURVE}, "the name of a dtype"),
    (PLATFORM, "axes", PLATFORM.axes * 2, "must have names of their own"),
    (PLATFORM, "sources", {"axes.d.rate": "me"}, r"'axes.d.rate'\]"),
  ],
)
def test_a_figure_out_of_range_or_no_name_is_refused(part, field, value, hint):
  with pytest.raises(ValueError, match=f"`{field}.*{hint}"):
    dataclasses.replace(part, **{field: value})


@pytest.mark.parametrize("given", [{"size": 8}, {"latency": 1}], ids=str)
def test_a_wrong_keyword_is_answered_by_the_call(given):
  call = (
    r"`Axis` must be called as Axis\(name=..., workers=..., link=...\), got "
  )
  (name,) = given
  with pytest.raises(TypeError, match=f"^{call}{name}=.$"):
    perfmodel.Axis(name="data", link=LINK, **given)
  with pytest.raises(TypeError, match=f"^{call}'data', 8.$"):
    perfmodel.Axis("data", 8)
  for part in (LINK.rate, CURVE, LINK, DEVICE, AXIS, PLATFORM):
    name = type(part).__name__
    with pytest.raises(TypeError, match=f"must be called as {name}.*, got one"):
      dataclasses.replace(part, one=1)
    assert copy.copy(part) == part


def test_axes_are_resized_and_collectives_with_traffic_are_known_by_name():
  cluster = perfmodel.builtin_platform("h100_cluster").resize(host=4)
  assert [axis.workers for axis in cluster.axes] == [4, 8]
  assert cluster.resize(host=16) == perfmodel.builtin_platform("h100_cluster")
  with pytest.raises(ValueError, match="`data` must be one of 'host', 'devi"):
    cluster.resize(data=4)
  pairs = set(_collectives._TRAFFIC)
  assert set(_platform.COLLECTIVES) == {op for op, _ in pairs}
  assert set(_collectives.ALGORITHMS) == {algorithm for _, algorithm in pairs}
