"""Platforms that take so many times as long as was thought."""

from __future__ import annotations

import dataclasses

import jax

from jaxmotion.codecs import Codec
from jaxmotion.collectives.extend import row_like
from jaxmotion.perfmodel import Curve, Device, Link, Platform, Rate
from jaxmotion.perfmodel.extend import decode_seconds, encode_seconds
from jaxmotion.planner.exchange._problem import ExchangeProblem

_CODING = ("encode", "decode", "add")
_LEAST_S = 1e-12  # Curves have no zeros.


def slower_device(platform: Platform, factor: float) -> Platform:
  """All that a device computes takes so many times as long."""
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
      memory_rate=Rate(bytes_per_s=device.memory_rate.bytes_per_s / factor),
      kernel_s=device.kernel_s * factor,
      call_s=device.call_s * factor,
      # Measured codecs are as fast as they were measured to be.
      measured={
        name: curve if name.split()[0] in _CODING else _slower(curve, factor)
        for name, curve in device.measured.items()
      },
    ),
  )


def _slower(curve: Curve, factor: float) -> Curve:
  return dataclasses.replace(
    curve, seconds=tuple(factor * s for s in curve.seconds)
  )


def slower_links(request: ExchangeProblem, factor: float) -> Platform:
  """All collectives of an exchange take so many times as long."""
  route = request.route

  def slower(link: Link) -> Link:
    return dataclasses.replace(
      link,
      latency_s=link.latency_s * factor,
      rate=Rate(bytes_per_s=link.rate.bytes_per_s / factor),
      measured={k: _slower(c, factor) for k, c in link.measured.items()},
    )

  axes = tuple(
    dataclasses.replace(axis, link=slower(axis.link))
    if axis.name in (route.axis, route.local_axis)
    else axis
    for axis in route.platform.axes
  )
  return dataclasses.replace(route.platform, axes=axes)


def slower_codecs(request: ExchangeProblem, factor: float) -> Platform:
  """All candidates take so many times as long, by curves of their own.

  The curves are exact at the sizes of the tensors.
  """
  platform, likes = request.route.platform, jax.tree.leaves(request.exchanged())
  sizes = {like.size for like in likes}
  sizes |= {row_like(like, request.workers).size for like in likes}
  curves = dict(platform.device.measured)
  for codec in request.candidates:
    curves |= _curves(codec, sizes - {0}, platform.device, factor)
  device = dataclasses.replace(platform.device, measured=curves)
  return dataclasses.replace(platform, device=device)


def _curves(
  codec: Codec, sizes: set[int], device: Device, factor: float
) -> dict[str, Curve]:
  def add(n: int) -> float:
    one, two = (decode_seconds(codec, n, k, device) for k in (1, 2))
    return two - one

  times = (
    lambda n: encode_seconds(codec, n, device),
    lambda n: decode_seconds(codec, n, 1, device),
    add,
  )
  curves = {}
  for do, time in zip(_CODING, times, strict=True):
    name = f"{do} {codec!r}"
    old = device.measured.get(name)
    every = sorted({*sizes, *(map(int, old.sizes) if old else ())})
    curves[name] = Curve(
      sizes=tuple(every),
      seconds=tuple(max(factor * time(n), _LEAST_S) for n in every),
      noise=old.noise if old else 0.0,
    )
  return curves
