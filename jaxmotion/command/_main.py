"""Parses the command line and runs each command."""

import argparse
import difflib
import functools
import math
import os
import pathlib
import re
import sys
import types
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import jax
import optax

from jaxmotion import calibration, codecs, core, perfmodel, planner
from jaxmotion.calibration.extend import measure_links
from jaxmotion.command import _platforms, _user_file
from jaxmotion.command._user_file import CommandError, name_flags

T = TypeVar("T")
_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2**10, "MIB": 2**20}
_UNITS |= {"GIB": 2**30, "TB": 1e12, "B": 1.0}
# Arguments of `jax.distributed.initialize` that a scheduler may give instead.
_MEMBERSHIP = {"coordinator_address": str, "num_processes": int}
_MEMBERSHIP |= {"process_id": int}
_TASK = """\
FILE.py:FUNCTION, a function without arguments that returns (loss_fn, params,
batch): a function (params, batch) -> loss, and trees of arrays or of
jax.ShapeDtypeStructs; `batch` is one worker's part."""


def main(
  arguments: Sequence[str] | None = None, ask: Callable[[str], str] = input
) -> int:
  """Runs one command and returns the exit status of the process.

  Args:
    arguments: those of the command line; None reads them from `sys.argv`.
    ask: function of a question that returns the answer.

  Returns:
    0; 1 after an error, which is the last line of the standard error; 141 if
    nobody reads the output.

  Example:
    >>> main(["advise", "nothing.py:make_loss"])
    1
  """
  options, unknown = _make_parser().parse_known_args(arguments)
  if unknown:
    _refuse_flags(options.parser, unknown)
  try:
    text = options.run(options, ask)
  except CommandError as error:
    _tell(f"jaxmotion: {error}")
    return 1
  except EOFError:
    _tell("\njaxmotion: The answers end before the questions.")
    return 1
  return _print_result(text)


def _print_result(text: str) -> int:
  """Prints a text to the standard output and returns the exit status."""
  try:
    # Now, so that Python has nothing left to write, and to fail at, as it ends.
    print(text, flush=True)
  except OSError as error:
    # What could not be written is still in the buffer, which Python would
    # write as it ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
      return 141
    _tell(f"jaxmotion: stdout: {error.strerror}.")
    return 1
  return 0


def _tell(text: str) -> None:
  """Prints a text to the standard error."""
  print(text, file=sys.stderr)


def _refuse_flags(
  parser: argparse.ArgumentParser, unknown: Sequence[str]
) -> NoReturn:
  """Ends with an error that names the flags nearest to unknown ones."""
  known = re.findall(r"--\w+", parser.format_help())
  texts = []
  for text in unknown:
    near = difflib.get_close_matches(text.partition("=")[0], known, n=1)
    texts.append(text + (f" (did you mean {near[0]}?)" if near else ""))
  parser.error(f"unrecognized arguments: {', '.join(texts)}")


def _make_parser() -> argparse.ArgumentParser:
  """Returns the parser of all commands and their flags."""
  parser = argparse.ArgumentParser(
    prog="jaxmotion",
    description="Says what compression gains before you train.",
  )
  commands = parser.add_subparsers(required=True, metavar="command")

  def add(
    name: str, run: Callable[..., str], text: str
  ) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=run, parser=command)
    return command

  advise = add("advise", _advise, "Choose a codec for each gradient, or none.")
  fit = add("fit", _fit, "Choose how to save activations within a budget.")
  sizes = add("bytes", _count, "Count what each codec sends in a step.")
  for command in (advise, fit, sizes):
    command.add_argument("task", help=_TASK)
    command.add_argument(
      "--platform",
      default="ethernet_10gbit",
      help="h200_node, h100_node, a100_node, h100_cluster, ethernet_1gbit, "
      "ethernet_10gbit, ethernet_25gbit, ethernet_100gbit, cpu2, or a JSON "
      "file that `jaxmotion platform` writes (default: %(default)s)",
    )
    command.add_argument(
      "--workers", type=int, help="number of workers, or of hosts"
    )
    command.add_argument(
      "--peak_share",
      type=float,
      default=1.0,
      help="share of the stated matmul rates that your programs reach, such "
      "as 0.5; refused if `jaxmotion platform` was told a share (default: "
      "%(default)s)",
    )
  advise.add_argument(
    "--accuracy_budget",
    type=float,
    default=0.1,
    help="greatest relative error of a gradient (default: %(default)s)",
  )
  for command in (advise, fit):
    command.add_argument(
      "--optimizer",
      help="expression of `optax`, such as 'adamw(3e-4)', whose state is "
      "counted (default: no state)",
    )
  fit.add_argument(
    "--budget", required=True, help="device memory, such as 80GB or 512MiB"
  )
  sizes.add_argument(
    "--codec",
    action="append",
    default=[],
    help="expression of `jaxmotion.codecs`, such as "
    "'feedback(uniform(bits=4))'; may be repeated",
  )
  describe = add(
    "platform", _describe, "Ask for a cluster's links and write a description."
  )
  describe.add_argument("file", help="JSON file to write")
  measure = add(
    "calibrate", _calibrate, "Measure this machine and write a description."
  )
  measure.add_argument("file", help="JSON file to write")
  measure.add_argument(
    "--workers", type=int, help="devices that work at once (default: all)"
  )
  measure.add_argument(
    "--codec",
    action="append",
    default=[],
    help="expression of `jaxmotion.codecs` to time; may be repeated",
  )
  links = add(
    "links",
    _links,
    "Measure the links between hosts and write a description. Start it once on "
    "each host.",
  )
  links.add_argument("file", help="JSON file that the first host writes")
  links.add_argument(
    "--platform",
    required=True,
    help="platform of the hosts' devices, such as h100_node, or a JSON file "
    "that `jaxmotion calibrate` writes",
  )
  for name, kind in _MEMBERSHIP.items():
    links.add_argument(
      f"--{name}", type=kind, help="as of jax.distributed.initialize"
    )
  for name, value, text in (
    ("largest", 1 << 23, "elements of the largest array"),
    ("sizes", 8, "number of sizes of each operation"),
    ("repeats", 20, "times that each size is timed"),
  ):
    for command in (measure, links):
      command.add_argument(
        f"--{name}", type=int, default=value, help=f"{text} (default: {value})"
      )
  return parser


def _read_task(
  options: argparse.Namespace,
) -> tuple[_user_file.UserTask, perfmodel.Platform]:
  """Returns the task of the user's file, and the platform of the flags."""
  platform = _platforms.read_platform(
    options.platform, options.workers, options.peak_share
  )
  function = _user_file.load_function("task", options.task)
  _tell("tracing the loss and pricing what may be done: seconds to minutes")
  returned = _user_file.call_user(repr(options.task), function)
  return _user_file.check_task(options.task, returned), platform


def _find_axes(platform: perfmodel.Platform) -> str | core.HostAxes:
  """Returns the axis of the workers, or those of hosts and their devices."""
  outer, *inner = (axis.name for axis in platform.axes)
  return core.HostAxes(outer, inner[0]) if inner else outer


def _advise(options: argparse.Namespace, _: Callable[[str], str]) -> str:
  """Returns the plan of an exchange as text."""
  optimizer = _parse_optimizer(options.optimizer)
  task, platform = _read_task(options)
  axes = _find_axes(platform)
  try:
    plan = planner.advise(
      task.loss_fn,
      task.params,
      (task.batch,),
      platform,
      optimizer=optimizer,
      accuracy_budget=options.accuracy_budget,
      mesh_axis=axes,
    )
  except (TypeError, ValueError) as error:
    raise name_flags(error, accuracy_budget="--accuracy_budget") from error
  room = "jaxmotion." if isinstance(axes, core.HostAxes) else ""
  use = f"jaxmotion.exchange({room}{axes!r}, {plan.codec!r})"
  if plan.refusal:
    use = "The exchange alone does not fit: see what is offered above."
  note = f"Predicted for {platform.name}, not measured."
  return "\n".join([str(plan), "", note, use])


def _fit(options: argparse.Namespace, _: Callable[[str], str]) -> str:
  """Returns the plan that fits a task into memory as text."""
  budget = _parse_bytes(options.budget)
  optimizer = _parse_optimizer(options.optimizer)
  task, platform = _read_task(options)
  try:
    plan = planner.fit_memory(
      task.loss_fn,
      task.params,
      (task.batch,),
      platform,
      budget,
      optimizer=optimizer,
      measure_memory=None,
      progress=_tell if sys.stderr.isatty() else None,
    )
  except (TypeError, ValueError) as error:
    raise name_flags(error, budget_bytes="--budget") from error
  return f"{plan}\n\nPredicted for {platform.device.name}, not compiled."


def _count(options: argparse.Namespace, _: Callable[[str], str]) -> str:
  """Returns a table of what one worker sends each step, by codec."""
  # Commands are given a function that asks questions, which this one does not
  # need. The first axis is that between hosts, the slow one.
  chosen = [_parse_codec(text) for text in options.codec]
  task, platform = _read_task(options)
  axes = _find_axes(platform)
  names = core.axis_names(axes)
  rows = [("codec", f"MB over {names[0]!r}", "ratio", "ms")]
  whole = None
  for codec in (codecs.identity(), *(chosen or planner.CANDIDATES)):
    try:
      exchange = perfmodel.predict_exchange(task.params, platform, axes, codec)
    except (TypeError, ValueError) as error:
      raise CommandError(f"{codec!r}: {error}") from error
    sent = exchange.ledger.select(axes=names[:1]).total_bytes
    whole = whole or sent
    rows.append(
      (
        planner.format_codec(codec),
        f"{sent / 1e6:.3f}",
        f"{whole / max(sent, 1):.2f}",
        f"{1e3 * exchange.total_s:.3f}",
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


def _parse_bytes(text: str) -> float:
  """Returns the bytes that a text states, such as "80GB" or "512MiB"."""
  digits = text.strip().upper()
  unit = max((u for u in _UNITS if digits.endswith(u)), key=len, default="")
  try:
    number = float(digits.removesuffix(unit)) * _UNITS.get(unit, 1.0)
  except ValueError:
    number = 0.0
  if not 0 < number < math.inf:
    raise CommandError(
      f"`--budget` must be bytes, such as 80GB or 512MiB, got {text!r}."
    )
  return number


def _parse_codec(text: str) -> codecs.Codec:
  """Returns the codec that an expression makes."""
  codec = _evaluate("--codec", text, codecs)
  if not isinstance(codec, codecs.Codec):
    raise CommandError(f"`--codec` must make a codec, got {text!r}.")
  return codec


def _parse_optimizer(text: str | None) -> optax.GradientTransformation | None:
  """Returns the optimizer that an expression makes, or None of None."""
  if text is None:
    return None
  optimizer = _evaluate("--optimizer", text, optax)
  if not isinstance(optimizer, optax.GradientTransformation):
    raise CommandError(f"`--optimizer` must make an optimizer, got {text!r}.")
  return optimizer


def _evaluate(flag: str, text: str, module: types.ModuleType) -> object:
  """Returns what an expression of a module's names makes."""
  names = {
    name: value for name, value in vars(module).items() if name[0] != "_"
  }
  try:
    return eval(text, {"__builtins__": {}}, names)
  except NameError as error:
    near = difflib.get_close_matches(error.name or "", names, n=1)
    raise CommandError(
      f"`{flag}` must be made of names of `{module.__name__}`, got {text!r}: "
      f"{error.name!r} is none{f'; did you mean {near[0]!r}?' if near else '.'}"
    ) from error
  except Exception as error:
    # The text of a SyntaxError ends with the place, which is the expression's.
    reason = error.msg if isinstance(error, SyntaxError) else error
    raise CommandError(
      f"`{flag}`: {text!r} raises {type(error).__name__}: {reason}"
    ) from error


def _describe(options: argparse.Namespace, ask: Callable[[str], str]) -> str:
  _check_file(options.file)
  platform = _platforms.ask_platform(ask, _tell)
  sources = platform.sources.items()
  assumed = [": ".join(s) for s in sources if s[1].startswith("assumed")]
  return "\n".join([*assumed, _write_platform(platform, options.file)])


def _calibrate(options: argparse.Namespace, _: Callable[[str], str]) -> str:
  """Measures this machine, writes the file and returns the rates."""
  _check_file(options.file)
  chosen = [_parse_codec(text) for text in options.codec]
  platform = _report_rounds(
    options,
    lambda **numbers: calibration.calibrate_platform(
      pathlib.Path(options.file).stem,
      workers=options.workers,
      codecs=chosen,
      **numbers,
    ),
  )
  return "\n".join(
    [_describe_rates(platform), _write_platform(platform, options.file)]
  )


def _report_rounds(options: argparse.Namespace, measure: Callable[..., T]) -> T:
  """Returns what `measure` finds, and tells the rounds that are done."""

  def report(done: int) -> None:
    end = "\n" if done == options.repeats else ""
    text = f"\rround {done} of {options.repeats}"
    print(text, end=end, file=sys.stderr, flush=True)

  names = ("largest", "sizes", "repeats")
  print("compiling", end="", file=sys.stderr, flush=True)
  try:
    return measure(
      **{name: getattr(options, name) for name in names}, report=report
    )
  except (TypeError, ValueError) as error:
    _tell("")  # Ends the line that tells how far it is.
    flags = {name: f"--{name}" for name in (*names, *_MEMBERSHIP)}
    raise name_flags(
      error, workers="--workers", platform="--platform", **flags
    ) from error


def _links(options: argparse.Namespace, _: Callable[[str], str]) -> str:
  """Measures the links of a job, writes the file and returns the rates."""
  _check_file(options.file)
  base = _platforms.load_device(options.platform)
  try:
    jax.distributed.initialize(
      **{name: getattr(options, name) for name in _MEMBERSHIP}
    )
  except (RuntimeError, TypeError, ValueError) as error:
    raise CommandError(
      "`--coordinator_address`, `--num_processes` and `--process_id` must be "
      f"given, or a scheduler that JAX knows must start the job: {error}"
    ) from error
  name = pathlib.Path(options.file).stem
  platform, rates = _report_rounds(
    options, functools.partial(measure_links, name, base)
  )
  if jax.process_index():
    return "took part; the first host writes the file"
  return "\n".join(
    [
      "measured, other traffic included:",
      _describe_link(platform.axes[0]),
      *(f"  host {k}: {v / 1e9:.3g} GByte/s" for k, v in rates.items()),
      _write_platform(platform, options.file),
    ]
  )


def _check_file(path: str) -> None:
  """Raises unless a platform can be written to this path."""
  if not path.endswith(".json"):
    raise CommandError(f"`file` must end in .json, got {path!r}.")
  if not pathlib.Path(path).absolute().parent.is_dir():
    # Before questions are answered, or a machine is measured.
    raise CommandError(f"`file` must be in a folder that exists, got {path!r}.")
  writable = path if pathlib.Path(path).exists() else pathlib.Path(path).parent
  if pathlib.Path(path).is_dir() or not os.access(writable, os.W_OK):
    raise CommandError(f"`file` must be one that can be written, got {path!r}.")


def _write_platform(platform: perfmodel.Platform, path: str) -> str:
  """Writes a platform and returns a line on how to use the file."""
  try:
    perfmodel.save_platform(platform, path)
  except OSError as error:
    raise CommandError(f"`file`: {error}") from error
  if not platform.axes:
    return (
      f"wrote {path}: one device without links. `jaxmotion platform` asks for "
      "links and takes this file as the device."
    )
  return f"wrote {path}: use it as --platform={path}"


def _describe_rates(platform: perfmodel.Platform) -> str:
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
  return "\n".join([*lines, *map(_describe_link, platform.axes)])


def _describe_link(axis: perfmodel.Axis) -> str:
  """Returns a line on the rate and the latency of an axis."""
  rate, latency = axis.link.rate.bytes_per_s, axis.link.latency_s
  return (
    f"  link over {axis.name}, {axis.workers} workers: "
    f"{rate / 1e9:.3g} GByte/s, {1e6 * latency:.3g} us"
  )
