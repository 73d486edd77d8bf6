import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import pytest

from experiments.train.cases import EXCHANGES
from jaxmotion import perfmodel
from jaxmotion.codecs import identity
from jaxmotion.codecs.extend import partition
from jaxmotion.perfmodel import _collectives, _platform, gbit_per_s, gbyte_per_s

NAMES = (
  "h200_node",
  "h100_node",
  "a100_node",
  "h100_cluster",
  "ethernet_1gbit",
  "ethernet_10gbit",
  "ethernet_25gbit",
  "ethernet_100gbit",
)
LINK = perfmodel.Link(latency_s=1e-5, rate=gbit_per_s(10))
PLATFORM = perfmodel.builtin_platform("ethernet_1gbit")
DEVICE = PLATFORM.device
CURVE = perfmodel.Curve(sizes=(1.0, 2.0), seconds=(1.0, 2.0), noise=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_a_platform_survives_json(name, tmp_path):
  platform = perfmodel.builtin_platform(name)
  assert platform.name == name
  path = tmp_path / "platform.json"
  perfmodel.save_platform(platform, path)
  assert perfmodel.load_platform(path) == platform


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_of_a_builtin_platform_has_a_source(name):
  platform = perfmodel.builtin_platform(name)
  # Fields with a default are options or measurements, not figures.
  choices = (".call_s", ".shared_by", ".efficiency", ".measured")
  figures = {f for f in platform.figure_paths() if not f.endswith(choices)}
  assert set(platform.sources) == figures
  assert all(platform.sources.values())


def test_cpu2_was_measured_with_curves_of_all_exchanges():
  platform = perfmodel.builtin_platform("cpu2")
  assert platform.name == "cpu2"
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


def test_an_unknown_platform_is_refused_with_all_names():
  with pytest.raises(ValueError, match=r"`name` must be one of 'h200_node'"):
    perfmodel.builtin_platform("tpu")


def test_a_byte_has_eight_bits():
  assert gbit_per_s(8) == gbyte_per_s(1)
  assert LINK.transfer_seconds(1.25e9) == pytest.approx(1 + 1e-5)


@pytest.mark.parametrize("rate", [1e9, 10, "10 Gbit/s", None])
def test_a_rate_without_a_unit_is_refused(rate):
  with pytest.raises(TypeError, match=r"`rate` must be .*bits or bytes\?"):
    dataclasses.replace(LINK, rate=rate)
  with pytest.raises(TypeError, match=r"`memory_rate`.*bits or bytes\?"):
    dataclasses.replace(DEVICE, memory_rate=rate)


@pytest.mark.parametrize("rate", [gbit_per_s(1e9), gbit_per_s(1e-6)])
def test_a_rate_out_of_range_is_refused(rate):
  with pytest.raises(
    ValueError, match="`rate` must be between.*are these bits"
  ):
    dataclasses.replace(LINK, rate=rate)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize(
  "field", ["vector_flops_per_s", "memory_bytes", "matmul_flops_per_s"]
)
def test_a_device_has_positive_figures(field, bad):
  value = {"float32": bad} if field == "matmul_flops_per_s" else bad
  with pytest.raises(ValueError, match=f"`{field}"):
    dataclasses.replace(DEVICE, **{field: value})


@pytest.mark.parametrize(
  ("field", "value", "hint"),
  [
    ("vector_flops_per_s", 989.0, "not GFLOP/s or TFLOP/s"),
    ("matmul_flops_per_s", {"bfloat16": 989.0}, "not GFLOP/s or TFLOP/s"),
    ("memory_bytes", 80.0, "not GB"),
    ("kernel_s", 5.0, "not microseconds"),
  ],
)
def test_a_figure_in_another_unit_is_refused(field, value, hint):
  with pytest.raises(ValueError, match=f"`{field}.*{hint}"):
    dataclasses.replace(DEVICE, **{field: value})


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("latency_s", -1e-6),
    ("latency_s", 50.0),
    ("latency_s", math.nan),
    ("shared_by", 0),
    ("efficiency", {"all_gather": 1.5}),
    ("efficiency", {"all_gather": 0}),
  ],
)
def test_a_link_refuses_figures_out_of_range(field, value):
  with pytest.raises((ValueError, TypeError), match=f"`{field}"):
    dataclasses.replace(LINK, **{field: value})


def plain():
  return perfmodel.platform_to_dict(perfmodel.builtin_platform("h100_cluster"))


def paths(tree, path=()):
  """Yields the paths of all fields that a file must have."""
  optional = {"call_s", "shared_by", "efficiency", "measured", "sources"}
  items = enumerate(tree) if isinstance(tree, list) else tree.items()
  for key, value in items:
    if key in optional:
      continue
    if not isinstance(key, int):
      yield (*path, key)
    if isinstance(value, (dict, list)) and key != "matmul_flops_per_s":
      yield from paths(value, (*path, key))


def test_a_description_without_fields_says_so():
  with pytest.raises(ValueError, match="'name', got no field at all"):
    perfmodel.platform_from_dict({})


@pytest.mark.parametrize("path", list(paths(plain())), ids=str)
def test_a_missing_figure_is_named(path):
  tree = plain()
  *parents, last = path
  inner = tree
  for key in parents:
    inner = inner[key]
  del inner[last]
  with pytest.raises(ValueError, match=f"must have a field '{last}'"):
    perfmodel.platform_from_dict(tree)


def test_an_error_in_a_file_has_its_path(tmp_path):
  tree = plain()
  tree["axes"][1]["link"]["rate"]["bytes_per_s"] = -1
  with pytest.raises(ValueError, match=r"`axes\[1\].link.rate` is not valid"):
    perfmodel.platform_from_dict(tree)
  tree = plain()
  tree["device"]["memory_gb"] = 80
  path = tmp_path / "typo.json"
  path.write_text(json.dumps(tree))
  with pytest.raises(ValueError, match=r"`device` must have.*got 'memory_gb'"):
    perfmodel.load_platform(path)
  tree = plain()
  tree["to_host"] = 64e9
  with pytest.raises(TypeError, match="`to_host` must be a dict"):
    perfmodel.platform_from_dict(tree)


def test_axes_are_resized_by_name():
  cluster = perfmodel.builtin_platform("h100_cluster").resize(host=4)
  assert [axis.workers for axis in cluster.axes] == [4, 8]
  assert cluster.resize(host=16) == perfmodel.builtin_platform("h100_cluster")
  with pytest.raises(
    ValueError, match="`data` must be one of 'host', 'device'"
  ):
    cluster.resize(data=4)
  with pytest.raises(ValueError, match="`axes` must have names of their own"):
    dataclasses.replace(cluster, axes=cluster.axes[:1] * 2)


def test_a_source_of_an_unknown_figure_is_refused():
  with pytest.raises(ValueError, match=r"sources\['axes.data.rate'\]"):
    dataclasses.replace(
      perfmodel.builtin_platform("h100_node"), sources={"axes.data.rate": "me"}
    )


def test_names_of_collectives_are_those_that_have_traffic():
  pairs = set(_collectives._TRAFFIC)
  assert set(_platform.COLLECTIVES) == {op for op, _ in pairs}
  assert set(_collectives.ALGORITHMS) == {algorithm for _, algorithm in pairs}


def test_a_misspelt_algorithm_is_refused():
  grads = jax.ShapeDtypeStruct((1024,), "float32")
  for algorithm in ("ring", "tree", "halving_doubling"):
    perfmodel.predict_exchange(grads, PLATFORM, "data", algorithm=algorithm)
  with pytest.raises(ValueError, match="`algorithm` must be one of .*'treee'"):
    perfmodel.predict_exchange(grads, PLATFORM, "data", algorithm="treee")


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


def test_workers_that_share_a_link_share_its_rate():
  link = perfmodel.Link(latency_s=1e-3, rate=perfmodel.gbit_per_s(1))
  shared = dataclasses.replace(link, shared_by=4)
  assert link.transfer_seconds(1e6) == pytest.approx(1e-3 + 8e-3)
  assert shared.transfer_seconds(1e6) == pytest.approx(1e-3 + 4 * 8e-3)
