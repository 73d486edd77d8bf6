"""Broken files of checkpoints and work folders, in one process."""

import contextlib
import io
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np

from experiments.common import workdir
from experiments.common.checkpoint import CheckpointStore, Log
from experiments.common.console import JobError
from experiments.fuzz.rounds import Defect, Round

_CASES = 60
_STEPS = 3
_DTYPES = np.float32, np.float16, np.int8, np.uint32, np.bool_


def run_round(seed: int) -> Round:
  """Breaks saved files at random and reads them again."""
  random_array = np.random.default_rng(seed)
  defects: list[Defect] = []
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    saved = _save_steps(folder / "whole", random_array)
    lines = [{"run": i, "loss": float(random_array.random())} for i in range(3)]
    workdir.write_sealed(folder / "lines", lines)
    for case in range(_CASES):
      # A chooser of its own: sizes of checkpoints vary from run to run, and
      # would change what is drawn for the cases that follow.
      chooser = Random(f"{seed} {case}")
      if case % 4 == 0:
        detail, what = _check_run(folder, saved, chooser)
      else:
        detail, what = _check_lines(folder / "lines", lines, chooser)
      if detail:
        law = "no broken file is read as if it were whole"
        text = f"run_round({seed}), case {case}: {what}"
        defects.append(Defect(law, text, detail))
  return Round(_CASES, tuple(defects))


def _save_steps(
  folder: Path, generator: np.random.Generator
) -> list[tuple[list[np.ndarray], Log]]:
  """Returns the trees and logs of steps that it has saved."""
  store = CheckpointStore(folder)
  shapes = [
    tuple(generator.integers(0, 5, generator.integers(0, 4)))
    for _ in range(generator.integers(1, 5))
  ]
  kinds = generator.choice(len(_DTYPES), len(shapes))
  saved = []
  log = Log([], [])
  for _ in range(_STEPS):
    log = Log([*log.loss, generator.random()], [*log.step_ms, 1.0])
    tree = [
      np.asarray(generator.integers(0, 100, shape)).astype(_DTYPES[kind])
      for shape, kind in zip(shapes, kinds, strict=True)
    ]
    store.save(tree, log)
    saved.append((tree, log))
  return saved


def _check_run(
  folder: Path, saved: list[tuple[list[np.ndarray], Log]], chooser: Random
) -> tuple[str, str]:
  """Returns what is wrong with a run of broken files, and what was broken."""
  broken = folder / "broken"
  shutil.rmtree(broken, ignore_errors=True)
  shutil.copytree(folder / "whole", broken)
  files = sorted(path for path in broken.rglob("*") if path.is_file())
  # The last two steps are kept. One is broken, or both.
  hit = chooser.sample(files, chooser.choice((1, 1, len(files))))
  names = {path: path.relative_to(broken) for path in files}
  steps = {path: int(name.parts[0]) for path, name in names.items()}
  whole = set(steps.values()) - {steps[path] for path in hit}
  what = ", ".join(f"{names[p]}: {_break_file(p, chooser)}" for p in hit)
  like = [np.zeros_like(x) for x in saved[0][0]]
  said = io.StringIO()
  with contextlib.redirect_stderr(said):
    try:
      tree, log = CheckpointStore(broken).restore(like)
    except JobError as error:
      return f"it is refused as a whole: {error}", what
  step = max(whole, default=0)
  wanted, wanted_log = saved[step - 1] if step else (like, Log([], []))
  if log != wanted_log:
    return f"the log has {len(log.loss)} steps, not {step}", what
  for found, expected in zip(tree, wanted, strict=True):
    if found.tobytes() != expected.tobytes():
      return f"step {step} has {found}, not {expected}", what
  if _STEPS not in whole and "is broken" not in said.getvalue():
    return f"no line says so: {said.getvalue()!r}", what
  return "", what


def _check_lines(
  path: Path, lines: list[dict], chooser: Random
) -> tuple[str, str]:
  """Returns what is wrong with broken lines, and what was broken."""
  whole = path.read_bytes()
  what = _break_file(path, chooser)
  found = workdir.read_sealed(path)
  path.write_bytes(whole)
  kept = [line for line in found if line is not None]
  wrong = [line for line in kept if line not in lines]
  return (f"it has {wrong[0]}" if wrong else ""), what


def _break_file(path: Path, chooser: Random) -> str:
  """Breaks a file in one way and returns the way."""
  data = path.read_bytes()
  name = chooser.choice(list(_WAYS)) if data else "append"
  broken = _WAYS[name](data, chooser)
  if broken == data:  # Zeros were zeros before.
    name, broken = "flip", _flip_bit(data, chooser)
  path.write_bytes(broken)
  if name == "delete":
    path.unlink()
  return name


def _flip_bit(data: bytes, chooser: Random) -> bytes:
  flipped = bytearray(data)
  flipped[chooser.randrange(len(data))] ^= 1 << chooser.randrange(8)
  return bytes(flipped)


def _zero_bytes(data: bytes, chooser: Random) -> bytes:
  begin = chooser.randrange(len(data))
  size = chooser.randrange(1, 64)
  return (
    data[:begin] + bytes(len(data[begin : begin + size])) + data[begin + size :]
  )


def _swap_halves(data: bytes, chooser: Random) -> bytes:
  cut = chooser.randrange(len(data))
  return data[cut:] + data[:cut]


_WAYS: dict[str, Callable[[bytes, Random], bytes]] = {
  "flip": _flip_bit,
  "cut": lambda data, chooser: data[: chooser.randrange(len(data))],
  "empty": lambda data, chooser: b"",
  "append": lambda data, chooser: data + chooser.randbytes(8),
  "zeros": _zero_bytes,
  "swap": _swap_halves,
  "delete": lambda data, chooser: b"",
}
