"""Platforms that a command names, and the questions that describe one."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from jaxmotion import perfmodel
from jaxmotion.command._user_file import CommandError, name_flags

T = TypeVar("T")
_TOLD = "as its user says"
# JAX makes no mesh of very many devices.
_MAX_WORKERS = 2**20
# The device of a platform, by the names that people give.
_DEVICES = {
  "h200": "h200_node",
  "h100": "h100_node",
  "a100": "a100_node",
  "cpu": "ethernet_1gbit",
}


def read_platform(
  name: str, workers: int | None = None, peak_share: float = 1.0
) -> perfmodel.Platform:
  """Returns the built-in platform of a name, or that of a JSON file."""
  # `workers` are those of its first axis. `peak_share` is the share of the
  # stated matmul rates that programs reach.
  try:
    if name.endswith(".json"):
      platform = perfmodel.load_platform(name)
    else:
      platform = perfmodel.builtin_platform(name)
  except FileNotFoundError as error:
    raise CommandError(
      f"`--platform` must name a file that exists, got {name!r}."
    ) from error
  except (OSError, TypeError, ValueError) as error:
    # A file has fields, among them `name`; a name is an argument.
    if name.endswith(".json"):
      raise name_flags(error, path="--platform") from error
    named = name_flags(error, name="--platform")
    hint = "A platform of your own is a file in .json."
    raise CommandError(f"{named} {hint}") from error
  if not 0 < peak_share <= 1:
    raise CommandError(
      f"`--peak_share` must be a number in (0, 1], got {peak_share}."
    )
  if workers is not None and not 1 <= workers <= _MAX_WORKERS:
    raise CommandError(
      f"`--workers` must be an integer in [1, {_MAX_WORKERS}], got {workers}."
    )
  if not platform.axes:
    raise CommandError(
      "`--platform` must have links between workers, got one of a single "
      "device: name its file as the device that `jaxmotion platform` asks for."
    )
  if workers is not None:
    platform = platform.resize(**{platform.axes[0].name: workers})
  try:
    device = _scale_matmuls(platform.device, peak_share)
  except ValueError as error:
    raise CommandError(f"`--peak_share`: {error}") from error
  return dataclasses.replace(platform, device=device)


def _scale_matmuls(device: perfmodel.Device, share: float) -> perfmodel.Device:
  """Returns a device whose matmuls reach a share of their stated rates."""
  rates = {
    dtype: share * rate for dtype, rate in device.matmul_flops_per_s.items()
  }
  return dataclasses.replace(device, matmul_flops_per_s=rates)


class _Dialog(NamedTuple):
  """Questions to a user, each repeated until it has an answer."""

  ask: Callable[[str], str]
  # Says what is wrong with an answer.
  tell: Callable[[str], None]

  def read(self, question: str, parse: Callable[[str], T]) -> T:
    """Returns what `parse` makes of the first answer that it takes."""
    while True:
      try:
        return parse(self.ask(question).strip())
      except CommandError as error:
        self.tell(f"{error} Answer again.")

  def read_number(
    self, question: str, *, whole: bool = False, most: float = math.inf
  ) -> float:
    """Returns a positive number that answers a question."""

    def parse(answer: str) -> float:
      """Returns the number that an answer states, if it is in range."""
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

    return self.read(question, parse)


def ask_platform(
  ask: Callable[[str], str], tell: Callable[[str], None]
) -> perfmodel.Platform:
  """Returns the platform that the answers to a few questions describe."""
  dialog = _Dialog(ask, tell)
  name = ask("Name of the platform: ").strip() or "my_cluster"
  device, to_host, is_measured = _ask_device(dialog)
  sources = {}
  if not is_measured:
    share = dialog.read_number(
      "Share of its peak that your matmuls reach (1 if unknown): ", most=1
    )
    device = _scale_matmuls(device, share)
    sources["device.matmul_flops_per_s"] = f"{share:g} of the peak, {_TOLD}"
  hosts = dialog.read_number("Number of hosts: ", whole=True)
  own = dialog.read_number("Devices on each host: ", whole=True)
  axes = []
  if hosts > 1:
    rate = dialog.read_number(
      "Link between hosts, Gbit/s (such as 25 or 100): "
    )
    latency = dialog.read_number("Its latency, microseconds: ")
    link = perfmodel.Link(
      latency_s=latency / 1e6,
      rate=perfmodel.gbit_per_s(rate),
      shared_by=int(own),
    )
    axes.append(perfmodel.Axis(name="host", workers=int(hosts), link=link))
  if own > 1 or hosts == 1:
    rate = dialog.read_number(
      "Link between devices of a host, GByte/s (PCIe 4: 25, NVLink: 450): "
    )
    link = perfmodel.Link(latency_s=5e-6, rate=perfmodel.gbyte_per_s(rate))
    axes.append(perfmodel.Axis(name="device", workers=int(own), link=link))
  for axis in axes:
    sources[f"axes.{axis.name}.rate"] = _TOLD
  return perfmodel.Platform(
    name=name,
    device=device,
    to_host=to_host,
    from_host=to_host,
    axes=tuple(axes),
    sources=sources,
  )


# A device, its link to the host, and whether both are measured.
_Found = tuple[perfmodel.Device, perfmodel.Link | None, bool]


def _ask_device(dialog: _Dialog) -> _Found:
  """Returns the device that a user names or describes."""
  known = ", ".join(_DEVICES)
  device = dialog.read(
    f"Device ({known}, other, or a file of `jaxmotion calibrate`): ",
    _parse_device,
  )
  return _ask_other_device(dialog) if device is None else device


def _parse_device(answer: str) -> _Found | None:
  """Returns the device that an answer names, None for another one."""
  if answer.endswith(".json"):
    try:
      measured = perfmodel.load_platform(answer)
    except (OSError, TypeError, ValueError) as error:
      raise CommandError(f"The device: {error}") from error
    return measured.device, measured.to_host, True
  name = answer.lower()
  if name in _DEVICES:
    like = perfmodel.builtin_platform(_DEVICES[name])
    return like.device, like.to_host, False
  if name != "other":
    raise CommandError(
      f"The device must be {', '.join(_DEVICES)}, other or a .json file, got "
      f"{answer!r}."
    )
  return None


def _ask_other_device(dialog: _Dialog) -> _Found:
  """Returns the device that a user's figures describe."""
  matmul = dialog.read_number("Its matmuls in bfloat16, TFLOP/s: ")
  wide = dialog.read_number("Its matmuls in float32, TFLOP/s: ")
  memory = dialog.read_number("Its memory, GByte/s: ")
  size = dialog.read_number("Its memory, GByte: ")
  host = dialog.read_number("Its link to the host, GByte/s: ")
  device = perfmodel.Device(
    name="other",
    matmul_flops_per_s={"bfloat16": matmul * 1e12, "float32": wide * 1e12},
    vector_flops_per_s=wide * 1e12,
    memory_rate=perfmodel.gbyte_per_s(memory),
    memory_bytes=size * 1e9,
    kernel_s=2e-6,
  )
  link = perfmodel.Link(latency_s=1e-5, rate=perfmodel.gbyte_per_s(host))
  return device, link, False
