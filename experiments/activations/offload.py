"""Predicted time of a step whose activations go to the host and return.

A layer computes while its activations are transferred, forward and backward,
and the next layer waits for both: max(compute, bytes / (ratio * link)). This is
vDNN's scheme, and cDMA's model of it. Times are predicted from datasheets and
shapes: nothing is measured or run.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax

from experiments import models
from jaxmotion import perfmodel
from jaxmotion.core import Array, PyTree, ShapedLike

_TITAN_X = "NVIDIA GeForce GTX TITAN X (Maxwell) specifications, 2015"
_PCIE3 = "PCI Express Base Specification 3.0: 8 GT/s, 128b/130b, 16 lanes"
_ASSUMED = "assumed, not measured"


def _titan_x() -> perfmodel.Platform:
  """Returns the GPU that cDMA was evaluated for: 3072 cores at 1 GHz."""
  host = perfmodel.Link(
    latency_s=1e-5, rate=perfmodel.Rate(bytes_per_s=8e9 * 16 * 128 / 130 / 8)
  )
  device = perfmodel.Device(
    name="GTX TITAN X (Maxwell)",
    matmul_flops_per_s={"float32": 6.144e12},
    vector_flops_per_s=6.144e12,
    memory_rate=perfmodel.gbyte_per_s(336.5),
    memory_bytes=12e9,
    kernel_s=2e-6,
  )
  sources = {
    "device.matmul_flops_per_s": _TITAN_X,
    "device.vector_flops_per_s": _TITAN_X,
    "device.memory_rate": _TITAN_X,
    "device.memory_bytes": _TITAN_X,
    "device.kernel_s": _ASSUMED,
    **{
      f"{link}.{figure}": source
      for link in ("to_host", "from_host")
      for figure, source in (("rate", _PCIE3), ("latency_s", _ASSUMED))
    },
  }
  return perfmodel.Platform(
    name="titan_x",
    device=device,
    to_host=host,
    from_host=host,
    axes=(),
    sources=sources,
  )


PLATFORMS = {
  "titan_x": _titan_x(),
  "a100": perfmodel.builtin_platform("a100_node"),
  "h200": perfmodel.builtin_platform("h200_node"),
}
"""GPUs and their links to the host, at the peaks of their datasheets."""


class Stage(NamedTuple):
  """Times and activations of one stage of a network."""

  name: str  # Name of the stage.
  forward_s: float  # Predicted seconds of the forward pass.
  backward_s: float  # Predicted seconds of the backward pass.
  # float32 bytes of the stage's activations, by name.
  moved_bytes: dict[str, int]


def predict_stages(
  net: models.Network, batch: int, device: perfmodel.Device
) -> list[Stage]:
  """Predicts the stages of a network by the roofline."""
  found = []
  params, (x, _) = net.params, net.batch(batch)
  seen = jax.eval_shape(net.activations, params, x)
  for name, block, _ in net.stages:
    own = params[name]
    y = jax.eval_shape(block, own, x)
    forward_s = _predict_pass(device, block, own, x)
    both_s = _predict_pass(
      device, functools.partial(_run_backward, block), own, x, y
    )
    moved = {
      key: 4 * a.size for key, a in seen.items() if key.startswith(f"{name}/")
    }
    found.append(Stage(name, forward_s, both_s - forward_s, moved))
    x = y
  return found


def predict_step(
  stages: list[Stage],
  platform: perfmodel.Platform,
  ratios: Mapping[str, float] | float,
) -> float:
  """Predicts the seconds of a forward and a backward pass with offloading."""
  total = 0.0
  for stage in stages:
    sent = sum(
      size / (ratios if isinstance(ratios, float) else ratios[name])
      for name, size in stage.moved_bytes.items()
    )
    total += max(stage.forward_s, _transfer_seconds(platform.to_host, sent))
    total += max(stage.backward_s, _transfer_seconds(platform.from_host, sent))
  return total


def sum_compute(stages: list[Stage]) -> float:
  """Returns the predicted seconds of both passes without any transfer."""
  return sum(stage.forward_s + stage.backward_s for stage in stages)


def _transfer_seconds(link: perfmodel.Link | None, sent: float) -> float:
  return link.transfer_seconds(sent) if link and sent else 0.0


def _run_backward(
  block: models.Block, params: PyTree, x: Array, ct: Array
) -> PyTree:
  """Returns the gradients of a block, after its forward pass."""
  _, pull = jax.vjp(block, params, x)
  return pull(ct)


def _predict_pass(
  device: perfmodel.Device, fn: Callable[..., PyTree], *args: ShapedLike
) -> float:
  return perfmodel.predict_seconds(perfmodel.predict_cost(fn, *args), device)
