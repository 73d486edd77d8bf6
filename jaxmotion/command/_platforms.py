"""Platforms that a command names, and the questions that describe one."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from jaxmotion import core, perfmodel
from jaxmotion.calibration.extend import drop_axes
from jaxmotion.command._user_file import CommandError, name_flags

T = TypeVar("T")
_TOLD = "as its user says"
_TOLD_SHARE = f" of the peak, {_TOLD}"
_USUAL = "assumed: 50 us, as of ethernet_10gbit"
_POSITIVE = core.number(0, open_low=True)
_SHARE = core.number(1e-3, 1)
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
  platform = load_device(name)
  if not platform.axes:
    raise CommandError(
      "`--platform` must have links between workers, got one of a single "
      "device: name its file as the device that `jaxmotion platform` asks for."
    )
  source = platform.sources.get("device.matmul_flops_per_s", "")
  has_share = source.endswith(_TOLD_SHARE) and source != f"1{_TOLD_SHARE}"
  if has_share and peak_share != 1:
    raise CommandError(
      "`--peak_share` must not be given for a platform that has a share, got "
      f"{peak_share:g}: the matmul rates of {platform.name!r} are {source}."
    )
  try:
    if workers is not None:
      core.integer(1, _MAX_WORKERS)("--workers", workers)
      platform = platform.resize(**{platform.axes[0].name: workers})
    device = _scale_matmuls(platform.device, peak_share)
  except ValueError as error:
    raise name_flags(error, share="--peak_share") from error
  return dataclasses.replace(platform, device=device)


def load_device(name: str) -> perfmodel.Platform:
  """Returns the platform of a name or a file, which may have no links."""
  try:
    if name.endswith(".json"):
      return perfmodel.load_platform(name)
    return perfmodel.builtin_platform(name)
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


def _scale_matmuls(device: perfmodel.Device, share: float) -> perfmodel.Device:
  """Returns a device whose matmuls reach a share of their stated rates."""
  _SHARE("share", share)
  rates = {
    dtype: share * rate for dtype, rate in device.matmul_flops_per_s.items()
  }
  return dataclasses.replace(device, matmul_flops_per_s=rates)


class _Dialog(NamedTuple):
  """Questions to a user, each repeated until it has an answer."""

  ask: Callable[[str], str]
  # Says what is wrong with an answer.
  tell: Callable[[str], None]

  def repeat(self, read: Callable[[], T]) -> T:
    """Returns what `read` makes of the first answers that it takes."""
    while True:
      try:
        return read()
      except (CommandError, OSError, TypeError, ValueError) as error:
        self.tell(f"{error} Answer again.")

  def read_number(
    self,
    question: str,
    kind: core.Kind = _POSITIVE,
    default: float | None = None,
  ) -> Any:
    """Returns the number of an answer, or `default` if that is empty."""

    def read() -> Any:
      answer = self.ask(question).strip()
      if not answer and default is not None:
        return default
      try:
        number: Any = float(answer)
      except ValueError:
        number = answer
      is_whole = isinstance(number, float) and number.is_integer()
      return kind(question.rstrip(": "), int(number) if is_whole else number)

    return self.repeat(read)


def ask_platform(
  ask: Callable[[str], str], tell: Callable[[str], None]
) -> perfmodel.Platform:
  """Returns the platform that the answers to a few questions describe."""
  dialog = _Dialog(ask, tell)
  name = ask("Name of the platform: ").strip() or "my_cluster"
  base, is_measured = dialog.repeat(lambda: _ask_device(dialog))
  device, sources = base.device, dict(base.sources)
  if not is_measured:
    share = dialog.read_number(
      "Share of its peak that your matmuls reach (1 if unknown): ", _SHARE, 1
    )
    device = _scale_matmuls(device, share)
    sources["device.matmul_flops_per_s"] = f"{share:g}{_TOLD_SHARE}"
  hosts = dialog.read_number("Number of hosts: ", core.integer(1))
  own = dialog.read_number("Devices on each host: ", core.integer(1))

  def ask_network() -> perfmodel.Axis:
    rate = dialog.read_number(
      "Link between hosts, Gbit/s (such as 25 or 100): "
    )
    latency = dialog.read_number(
      "Its latency, microseconds (50 if unknown): ", default=0
    )
    sources["axes.host.latency_s"] = _TOLD if latency else _USUAL
    link = perfmodel.Link(
      latency_s=(latency or 50) / 1e6,
      rate=perfmodel.gbit_per_s(rate),
      shared_by=own,
    )
    return perfmodel.Axis(name="host", workers=hosts, link=link)

  def ask_node() -> perfmodel.Axis:
    rate = dialog.read_number(
      "Link between devices of a host, GByte/s (PCIe 4: 25, NVLink: 450): "
    )
    sources["axes.device.latency_s"] = "assumed: 5 us"
    link = perfmodel.Link(latency_s=5e-6, rate=perfmodel.gbyte_per_s(rate))
    return perfmodel.Axis(name="device", workers=own, link=link)

  axes = [dialog.repeat(ask_network)] if hosts > 1 else []
  if own > 1 or hosts == 1:
    axes.append(dialog.repeat(ask_node))
  for axis in axes:
    sources[f"axes.{axis.name}.rate"] = _TOLD
  return dataclasses.replace(
    base, name=name, device=device, axes=tuple(axes), sources=sources
  )


def _ask_device(dialog: _Dialog) -> tuple[perfmodel.Platform, bool]:
  """Returns the device that a user names, and whether it is measured."""
  known = ", ".join(_DEVICES)
  question = f"Device ({known}, other, or a file of `jaxmotion calibrate`): "
  answer = dialog.ask(question).strip()
  if answer.endswith(".json"):
    return drop_axes(perfmodel.load_platform(answer)), True
  name = answer.lower()
  if name in _DEVICES:
    return drop_axes(perfmodel.builtin_platform(_DEVICES[name])), False
  if name != "other":
    raise CommandError(
      f"The device must be {', '.join(_DEVICES)}, other or a .json file, got "
      f"{answer!r}."
    )
  return _ask_other_device(dialog), False


def _ask_other_device(dialog: _Dialog) -> perfmodel.Platform:
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
  told = ("matmul_flops_per_s", "vector_flops_per_s", "memory_rate")
  sources = {f"device.{field}": _TOLD for field in (*told, "memory_bytes")}
  sources["device.kernel_s"] = "assumed: 2 us"
  for way in ("to_host", "from_host"):
    sources |= {f"{way}.rate": _TOLD, f"{way}.latency_s": "assumed: 10 us"}
  return perfmodel.Platform(
    name="other",
    device=device,
    to_host=link,
    from_host=link,
    axes=(),
    sources=sources,
  )
