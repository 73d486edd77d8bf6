import dataclasses
import json
import math

import jax.numpy as jnp
import pytest

from experiments.train.cases import EXCHANGES
from jaxmotion import perfmodel
from jaxmotion.codecs import identity
from jaxmotion.codecs.extend import partition
from jaxmotion.perfmodel import gbit_per_s, gbyte_per_s

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
DEVICE = perfmodel.builtin_platform("ethernet_1gbit").device


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
  choices = (
    ".call_s",
    ".full_duplex",
    ".shared_by",
    ".efficiency",
    ".measured",
  )
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
    ("full_duplex", 1),
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
  optional = {
    "call_s",
    "full_duplex",
    "shared_by",
    "efficiency",
    "measured",
    "sources",
  }
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
