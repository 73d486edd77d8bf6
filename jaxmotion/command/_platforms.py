"""Platforms that a command names, and the questions that describe one."""

import dataclasses
import math
from collections.abc import Callable

from jaxmotion.command._user_file import CommandError, name_flags
from jaxmotion.perfmodel import (
  Axis,
  Device,
  Link,
  Platform,
  builtin_platform,
  gbit_per_s,
  gbyte_per_s,
  load_platform,
)

_TOLD = "as its user says"
# The device of a platform, by the names that people give.
_DEVICES = {
  "h200": "h200_node",
  "h100": "h100_node",
  "a100": "a100_node",
  "cpu": "ethernet_1gbit",
}


def read_platform(
  name: str, workers: int | None = None, peak_share: float = 1.0
) -> Platform:
  """Returns the platform of a name or of a JSON file.

  Args:
    name: name of a built-in platform, or path of a file that ends in `.json`.
    workers: number of workers on its first axis; None keeps that of the
      platform.
    peak_share: share in (0, 1] of the stated matmul rates that programs reach.

  Raises:
    CommandError: there is no such platform, or the file does not hold one.
  """
  try:
    if name.endswith(".json"):
      platform = load_platform(name)
    else:
      platform = builtin_platform(name)
  except FileNotFoundError as error:
    raise CommandError(
      f"`--platform` must name a file that exists, got {name!r}."
    ) from error
  except (OSError, TypeError, ValueError) as error:
    named = name_flags(error, path="--platform", name="--platform")
    is_file = name.endswith(".json")
    hint = "" if is_file else " A platform of your own is a file in .json."
    raise CommandError(f"{named}{hint}") from error
  if not 0 < peak_share <= 1:
    raise CommandError(
      f"`--peak_share` must be a number in (0, 1], got {peak_share}."
    )
  if workers is not None and workers < 1:
    raise CommandError(f"`--workers` must be at least 1, got {workers}.")
  if not platform.axes:
    raise CommandError(
      "`--platform` must have links between workers, got one of a single "
      "device: name its file as the device that `jaxmotion platform` asks for."
    )
  if workers is not None:
    platform = platform.resize(**{platform.axes[0].name: workers})
  return dataclasses.replace(
    platform, device=_scale_matmuls(platform.device, peak_share)
  )


def _scale_matmuls(device: Device, share: float) -> Device:
  """Returns a device whose matmuls reach a share of their stated rates."""
  rates = {
    dtype: share * rate for dtype, rate in device.matmul_flops_per_s.items()
  }
  return dataclasses.replace(device, matmul_flops_per_s=rates)


def ask_platform(ask: Callable[[str], str]) -> Platform:
  """Returns the platform that the answers to a few questions describe.

  Args:
    ask: function of a question that returns the answer.

  Raises:
    CommandError: an answer is none to its question.
  """
  name = ask("Name of the platform: ").strip() or "my_cluster"
  known = ", ".join(_DEVICES)
  device, to_host, is_measured = _ask_device(
    ask, f"Device ({known}, other, or a file of `jaxmotion calibrate`): "
  )
  sources = {}
  if not is_measured:
    share = _ask_number(
      ask, "Share of its peak that your matmuls reach (1 if unknown): ", most=1
    )
    device = _scale_matmuls(device, share)
    sources["device.matmul_flops_per_s"] = f"{share:g} of the peak, {_TOLD}"
  hosts = _ask_number(ask, "Number of hosts: ", whole=True)
  own = _ask_number(ask, "Devices on each host: ", whole=True)
  axes = []
  if hosts > 1:
    rate = _ask_number(ask, "Link between hosts, Gbit/s (such as 25 or 100): ")
    latency = _ask_number(ask, "Its latency, microseconds: ")
    link = Link(
      latency_s=latency / 1e6, rate=gbit_per_s(rate), shared_by=int(own)
    )
    axes.append(Axis(name="host", workers=int(hosts), link=link))
  if own > 1 or hosts == 1:
    rate = _ask_number(
      ask, "Link between devices of a host, GByte/s (PCIe 4: 25, NVLink: 450): "
    )
    link = Link(latency_s=5e-6, rate=gbyte_per_s(rate))
    axes.append(Axis(name="device", workers=int(own), link=link))
  for axis in axes:
    sources[f"axes.{axis.name}.rate"] = _TOLD
  return Platform(
    name=name,
    device=device,
    to_host=to_host,
    from_host=to_host,
    axes=tuple(axes),
    sources=sources,
  )


def _ask_device(
  ask: Callable[[str], str], question: str
) -> tuple[Device, Link | None, bool]:
  """Returns a device, its link to the host, and whether both are measured."""
  answer = ask(question).strip()
  if answer.endswith(".json"):
    try:
      measured = load_platform(answer)
    except (OSError, TypeError, ValueError) as error:
      raise CommandError(f"The device: {error}") from error
    return measured.device, measured.to_host, True
  answer = answer.lower()
  if answer in _DEVICES:
    like = builtin_platform(_DEVICES[answer])
    return like.device, like.to_host, False
  if answer != "other":
    raise CommandError(
      f"The device must be {', '.join(_DEVICES)}, other or a .json file, got "
      f"{answer!r}."
    )
  matmul = _ask_number(ask, "Its matmuls in bfloat16, TFLOP/s: ")
  wide = _ask_number(ask, "Its matmuls in float32, TFLOP/s: ")
  memory = _ask_number(ask, "Its memory, GByte/s: ")
  size = _ask_number(ask, "Its memory, GByte: ")
  host = _ask_number(ask, "Its link to the host, GByte/s: ")
  device = Device(
    name=answer,
    matmul_flops_per_s={"bfloat16": matmul * 1e12, "float32": wide * 1e12},
    vector_flops_per_s=wide * 1e12,
    memory_rate=gbyte_per_s(memory),
    memory_bytes=size * 1e9,
    kernel_s=2e-6,
  )
  return device, Link(latency_s=1e-5, rate=gbyte_per_s(host)), False


def _ask_number(
  ask: Callable[[str], str],
  question: str,
  *,
  whole: bool = False,
  most: float = math.inf,
) -> float:
  """Returns a positive number that answers a question."""
  answer = ask(question)
  try:
    number = int(answer) if whole else float(answer)
  except ValueError:
    number = 0
  if not 0 < number < math.inf or number > most:
    kind = "whole number" if whole else "number"
    limit = "" if most == math.inf else f" of at most {most:g}"
    raise CommandError(
      f"{question.rstrip(': ')!r} must be a positive {kind}{limit}, got "
      f"{answer!r}."
    )
  return number
