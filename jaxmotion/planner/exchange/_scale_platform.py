"""Scales a platform's device, link or codec times by a measured factor."""

from __future__ import annotations

import dataclasses

import jax

from jaxmotion import codecs, core, perfmodel
from jaxmotion.collectives.extend import part_like
from jaxmotion.perfmodel.extend import decode_seconds, encode_seconds
from jaxmotion.planner.exchange import _problem

_CODING = ("encode", "decode", "add")
# Curves must be positive.
_MIN_SECONDS = 1e-12


def scale_device(
  platform: perfmodel.Platform, factor: float
) -> perfmodel.Platform:
  """Returns a platform whose device computes `factor` times as long."""
  device = platform.device
  return dataclasses.replace(
    platform,
    device=dataclasses.replace(
      device,
      matmul_flops_per_s={
        dtype: rate / factor
        for dtype, rate in device.matmul_flops_per_s.items()
      },
      vector_flops_per_s=device.vector_flops_per_s / factor,
      memory_rate=perfmodel.Rate(
        bytes_per_s=device.memory_rate.bytes_per_s / factor
      ),
      kernel_s=device.kernel_s * factor,
      call_s=device.call_s * factor,
      # Curves of codecs were measured: the step's factor says nothing of them.
      measured={
        name: curve
        if name.split()[0] in _CODING
        else _scale_curve(curve, factor)
        for name, curve in device.measured.items()
      },
    ),
  )


def _scale_curve(curve: perfmodel.Curve, factor: float) -> perfmodel.Curve:
  return dataclasses.replace(
    curve, seconds=tuple(factor * s for s in curve.seconds)
  )


def scale_links(
  problem: _problem.ExchangeProblem, factor: float
) -> perfmodel.Platform:
  """Returns a platform whose collectives take `factor` times as long."""
  platform = problem.platform
  scaled_axes = core.axis_names(problem.mesh_axis)
  axes = tuple(
    dataclasses.replace(axis, link=_scale_link(axis.link, factor))
    if axis.name in scaled_axes
    else axis
    for axis in platform.axes
  )
  return dataclasses.replace(platform, axes=axes)


def _scale_link(link: perfmodel.Link, factor: float) -> perfmodel.Link:
  return dataclasses.replace(
    link,
    latency_s=link.latency_s * factor,
    rate=perfmodel.Rate(bytes_per_s=link.rate.bytes_per_s / factor),
    measured={
      name: _scale_curve(curve, factor) for name, curve in link.measured.items()
    },
  )


def scale_codecs(
  problem: _problem.ExchangeProblem, factor: float
) -> perfmodel.Platform:
  """Returns a platform on which all candidates take `factor` times as long."""
  # Each codec gets curves of its own, which are exact at the sizes of the
  # problem's tensors and of their parts.
  platform = problem.platform
  leaves = jax.tree.leaves(problem.exchanged_tree())
  sizes = {leaf.size for leaf in leaves}
  curves = dict(platform.device.measured)
  for codec in problem.candidates:
    parts = {part_like(codec, leaf, problem.workers).size for leaf in leaves}
    curves |= _codec_curves(
      codec, (sizes | parts) - {0}, platform.device, factor
    )
  device = dataclasses.replace(platform.device, measured=curves)
  return dataclasses.replace(platform, device=device)


def _codec_curves(
  codec: codecs.Codec, sizes: set[int], device: perfmodel.Device, factor: float
) -> dict[str, perfmodel.Curve]:
  """Returns curves of encoding, decoding and adding one more payload."""

  def add_seconds(n: int) -> float:
    one, two = (decode_seconds(codec, n, k, device) for k in (1, 2))
    return two - one

  timers = (
    lambda n: encode_seconds(codec, n, device),
    lambda n: decode_seconds(codec, n, 1, device),
    add_seconds,
  )
  curves = {}
  for action, seconds in zip(_CODING, timers, strict=True):
    name = f"{action} {codec!r}"
    old = device.measured.get(name)
    knots = sorted({*sizes, *(map(int, old.sizes) if old else ())})
    curves[name] = perfmodel.Curve(
      sizes=tuple(knots),
      seconds=tuple(max(factor * seconds(n), _MIN_SECONDS) for n in knots),
      noise=old.noise if old else 0.0,
    )
  return curves
