"""Built-in platforms, from datasheets or measurements, with their sources.

Datasheets give peak rates, which programs do not reach: seconds that are
predicted from them are lower bounds.
"""

import dataclasses
import pathlib

from jaxmotion import core
from jaxmotion.perfmodel import _figures, _json, _platform

_HERE = pathlib.Path(__file__).parent
_H100 = "NVIDIA H100 Tensor Core GPU datasheet (2023), SXM"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet (2024), SXM"
_A100 = "NVIDIA A100 Tensor Core GPU datasheet (2021), 80 GB SXM"
_NCCL = "NCCL, src/graph/tuning.cc, Simple protocol, a hop of the ring"
_ASSUMED = "assumed, not measured: measure yours"
_PYDTNN = "Castello et al. 2021, defaults of their library (PyDTNN)"


def builtin_platform(name: str) -> _platform.Platform:
  """Returns one of the platforms that come with jaxmotion.

  Args:
    name: name of the platform, one of

      - "h200_node", "h100_node", "a100_node": 8 GPUs on NVLink, axis "device";
      - "h100_cluster": 16 such H100 nodes, axes "host" and "device";
      - "ethernet_1gbit", "ethernet_10gbit", "ethernet_25gbit",
        "ethernet_100gbit": 8 hosts without GPUs, axis "data";
      - "cpu2": 2 devices that a host of 2 cores emulates, axis "data",
        measured by `experiments.perfmodel.validate`.

      `Platform.resize` changes the numbers of workers.

  Returns:
    The platform; its `sources` give the origin of each figure.

  Raises:
    ValueError: no built-in platform has that name.

  Example:
    >>> builtin_platform("h100_node").sources["device.memory_rate"]
    'NVIDIA H100 Tensor Core GPU datasheet (2023), SXM'
    >>> builtin_platform("h100_node").sources["device.kernel_s"]
    'assumed, not measured: measure yours'
  """
  networks = {f"ethernet_{gbit}gbit": gbit for gbit in (1, 10, 25, 100)}
  core.choice((*_NODES, "h100_cluster", *networks, "cpu2"))("name", name)
  if name in _NODES:
    return _make_node(name)
  if name in networks:
    return _make_ethernet(networks[name])
  if name == "h100_cluster":
    return _make_cluster()
  return _json.load_platform(_HERE / "cpu2.json")


def _make_hopper(
  name: str, gbyte: float, memory_bytes: float
) -> _platform.Device:
  """Returns a GPU that computes as the H100 does, with its own memory."""
  return _platform.Device(
    name=name,
    # Peaks without sparsity. JAX multiplies float32 in TF32 by default.
    matmul_flops_per_s={
      "float32": 494.7e12,
      "bfloat16": 989.4e12,
      "float16": 989.4e12,
      "float8_e4m3fn": 1978.9e12,
      "float8_e5m2": 1978.9e12,
      "int8": 1978.9e12,
      "float64": 66.9e12,
    },
    vector_flops_per_s=66.9e12,
    memory_rate=_figures.gbyte_per_s(gbyte),
    memory_bytes=memory_bytes,
    kernel_s=2e-6,
  )


_AMPERE = _platform.Device(
  name="A100 SXM 80 GB",
  matmul_flops_per_s={
    "float32": 156e12,
    "bfloat16": 312e12,
    "float16": 312e12,
    "int8": 624e12,
    "float64": 19.5e12,
  },
  vector_flops_per_s=19.5e12,
  memory_rate=_figures.gbyte_per_s(2039),
  memory_bytes=80e9,
  kernel_s=2e-6,
)
# Device, source, and the rates of NVLink and PCIe in GB/s each way.
_NODES: dict[str, tuple[_platform.Device, str, float, float]] = {
  "h200_node": (_make_hopper("H200 SXM 141 GB", 4800, 141e9), _H200, 450, 64),
  "h100_node": (_make_hopper("H100 SXM 80 GB", 3350, 80e9), _H100, 450, 64),
  "a100_node": (_AMPERE, _A100, 300, 32),
}


def _make_node(name: str) -> _platform.Platform:
  """Returns a node of 8 GPUs on NVLink."""
  device, source, nvlink, pcie = _NODES[name]
  host = _platform.Link(latency_s=1e-5, rate=_figures.gbyte_per_s(pcie))
  link = _platform.Link(latency_s=3.4e-6, rate=_figures.gbyte_per_s(nvlink))
  return _platform.Platform(
    name=name,
    device=device,
    to_host=host,
    from_host=host,
    axes=(_platform.Axis(name="device", workers=8, link=link),),
    sources=_list_sources(source, "axes.device", _NCCL, source),
  )


def _make_cluster() -> _platform.Platform:
  """Returns H100 nodes with a network card for each GPU."""
  node = _make_node("h100_node")
  between = _platform.Link(latency_s=1.4e-5, rate=_figures.gbit_per_s(400))
  host = _platform.Axis(name="host", workers=16, link=between)
  cards = "NVIDIA DGX H100 datasheet: ConnectX-7 per GPU"
  sources = {"axes.host.latency_s": _NCCL, "axes.host.rate": cards}
  return dataclasses.replace(
    node,
    name="h100_cluster",
    axes=(host, *node.axes),
    sources={**node.sources, **sources},
  )


def _make_ethernet(gbit: int) -> _platform.Platform:
  """Returns hosts without GPUs, with the figures of a published library."""
  memory = _platform.Link(latency_s=1e-6, rate=_figures.gbyte_per_s(50))
  link = _platform.Link(latency_s=5e-5, rate=_figures.gbit_per_s(gbit))
  device = _platform.Device(
    name="host without GPU",
    matmul_flops_per_s={"float32": 4e12},
    vector_flops_per_s=4e12,
    memory_rate=_figures.gbyte_per_s(50),
    memory_bytes=64e9,
    kernel_s=1e-6,
  )
  nominal = "IEEE 802.3, nominal rate"
  sources = _list_sources(_PYDTNN, "axes.data", _ASSUMED, nominal)
  return _platform.Platform(
    name=f"ethernet_{gbit}gbit",
    device=device,
    to_host=memory,
    from_host=memory,
    axes=(_platform.Axis(name="data", workers=8, link=link),),
    sources={**sources, "device.memory_bytes": _ASSUMED},
  )


def _list_sources(
  peaks: str, axis: str, latency: str, rate: str
) -> dict[str, str]:
  """Returns the sources of a device, its links to the host and one axis."""
  figures = "matmul_flops_per_s vector_flops_per_s memory_rate memory_bytes"
  sources = {f"device.{figure}": peaks for figure in figures.split()}
  sources["device.kernel_s"] = _ASSUMED
  for path in ("to_host", "from_host"):
    sources |= {f"{path}.latency_s": _ASSUMED, f"{path}.rate": peaks}
  return sources | {f"{axis}.latency_s": latency, f"{axis}.rate": rate}
