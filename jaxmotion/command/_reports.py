"""Texts that the commands print."""

import difflib
import math
from collections.abc import Sequence

import jax

from jaxmotion import codecs, core, perfmodel, planner
from jaxmotion.command import _user_file

_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2**10, "MIB": 2**20}
_UNITS |= {"GIB": 2**30, "TB": 1e12, "B": 1.0}


def parse_bytes(text: str) -> float:
  """Returns the bytes that a text states, such as "80GB" or "512MiB"."""
  digits = text.strip().upper()
  unit = max((u for u in _UNITS if digits.endswith(u)), key=len, default="")
  try:
    number = float(digits.removesuffix(unit)) * _UNITS.get(unit, 1.0)
  except ValueError:
    number = 0.0
  if not 0 < number < float("inf"):
    raise _user_file.CommandError(
      f"`--budget` must be bytes, such as 80GB or 512MiB, got {text!r}."
    )
  return number


def parse_codec(text: str) -> codecs.Codec:
  """Returns the codec that an expression makes."""
  names = {
    name: value for name, value in vars(codecs).items() if name[0] != "_"
  }
  try:
    codec = eval(text, {"__builtins__": {}}, names)
  except NameError as error:
    near = difflib.get_close_matches(error.name or "", names, n=1)
    raise _user_file.CommandError(
      f"`--codec` must be made of names of `jaxmotion.codecs`, got {text!r}: "
      f"{error.name!r} is none{f'; did you mean {near[0]!r}?' if near else '.'}"
    ) from error
  except Exception as error:
    # The text of a SyntaxError ends with the place, which is the codec's own.
    reason = error.msg if isinstance(error, SyntaxError) else error
    raise _user_file.CommandError(
      f"`--codec`: {text!r} raises {type(error).__name__}: {reason}"
    ) from error
  if not isinstance(codec, codecs.Codec):
    raise _user_file.CommandError(f"`--codec` must make a codec, got {text!r}.")
  return codec


def report_advice(
  task: _user_file.UserTask,
  platform: perfmodel.Platform,
  accuracy_budget: float,
) -> str:
  """Returns the plan of an exchange as text."""
  axes = _find_axes(platform)
  try:
    plan = planner.advise(
      task.loss_fn,
      task.params,
      (task.batch,),
      platform,
      accuracy_budget=accuracy_budget,
      mesh_axis=axes,
    )
  except (TypeError, ValueError) as error:
    raise _user_file.name_flags(
      error, accuracy_budget="--accuracy_budget"
    ) from error
  room = "jaxmotion." if isinstance(axes, core.HostAxes) else ""
  use = f"jaxmotion.exchange({room}{axes!r}, {plan.codec!r})"
  note = f"Predicted for {platform.name}, not measured."
  return "\n".join([str(plan), "", note, use])


def _find_axes(platform: perfmodel.Platform) -> str | core.HostAxes:
  """Returns the axis of the workers, or those of hosts and their devices."""
  outer, *inner = (axis.name for axis in platform.axes)
  return core.HostAxes(outer, inner[0]) if inner else outer


def report_memory(
  task: _user_file.UserTask, platform: perfmodel.Platform, budget: float
) -> str:
  """Returns the plan that fits a task into memory as text."""
  try:
    plan = planner.fit_memory(
      task.loss_fn,
      task.params,
      (task.batch,),
      platform,
      budget,
      measure_memory=None,
    )
  except (TypeError, ValueError) as error:
    raise _user_file.name_flags(error, budget_bytes="--budget") from error
  return f"{plan}\n\nPredicted for {platform.device.name}, not compiled."


def report_bytes(
  task: _user_file.UserTask,
  platform: perfmodel.Platform,
  chosen: Sequence[codecs.Codec],
) -> str:
  """Returns a table of what one worker sends each step, by codec."""
  axes = _find_axes(platform)
  names = core.axis_names(axes)
  rows = [("codec", f"MB over {names[0]!r}", "ratio", "ms")]
  whole = None
  for codec in (codecs.identity(), *(chosen or planner.CANDIDATES)):
    try:
      found = perfmodel.predict_exchange(task.params, platform, axes, codec)
    except (TypeError, ValueError) as error:
      raise _user_file.CommandError(f"{codec!r}: {error}") from error
    sent = found.ledger.select(axes=names[:1]).total_bytes
    whole = whole or sent
    rows.append(
      (
        planner.format_codec(codec),
        f"{sent / 1e6:.3f}",
        f"{whole / max(sent, 1):.2f}",
        f"{1e3 * found.total_s:.3f}",
      )
    )
  leaves = jax.tree.leaves(task.params)
  sizes = sum(leaf.size for leaf in leaves)
  workers = math.prod(platform.axis(name).workers for name in names)
  return (
    f"{len(leaves)} gradients of {sizes:,} elements, {workers} workers of "
    f"{platform.name}; the last column is predicted, not measured.\n\n"
    f"{core.text_table(rows)}"
  )


def describe_rates(platform: perfmodel.Platform) -> str:
  """Returns the rates of a measured platform as text."""
  device = platform.device
  lines = [
    f"measured on {device.name}, other processes included:",
    *(
      f"  matmul, {dtype}: {rate / 1e9:.4g} GFLOP/s"
      for dtype, rate in device.matmul_flops_per_s.items()
    ),
    f"  memory: {device.memory_rate.bytes_per_s / 1e9:.3g} GByte/s",
    f"  an empty program: {1e6 * device.call_s:.3g} us",
  ]
  for axis in platform.axes:
    rate, latency = axis.link.rate.bytes_per_s, axis.link.latency_s
    lines.append(
      f"  link over {axis.name}, {axis.workers} workers: "
      f"{rate / 1e9:.3g} GByte/s, {1e6 * latency:.3g} us"
    )
  return "\n".join(lines)
