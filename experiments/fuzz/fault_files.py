"""Broken files of checkpoints and work folders, in one process."""

import contextlib
import io
import pathlib
import random
import shutil
import tempfile
from collections.abc import Callable

import numpy as np

from experiments.common import checkpoint, console, workdir
from experiments.fuzz import rounds

_CASES = 60
_STEPS = 3
_DTYPES = np.float32, np.float16, np.int8, np.uint32, np.bool_


def run_round(seed: int) -> rounds.Round:
  """Breaks saved files at random and reads them again."""
  random_array = np.random.default_rng(seed)
  defects: list[rounds.Defect] = []
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    saved = _save_steps(folder / "whole", random_array)
    lines = [{"run": i, "loss": float(random_array.random())} for i in range(3)]
    workdir.write_sealed(folder / "lines", lines)
    for case in range(_CASES):
      # A chooser of its own: sizes of checkpoints vary from run to run, and
      # would change what is drawn for the cases that follow.
      chooser = random.Random(f"{seed} {case}")
      if case % 4 == 0:
        detail, what = _check_run(folder, saved, chooser)
      else:
        detail, what = _check_lines(folder / "lines", lines, chooser)
      if detail:
        law = "no broken file is read as if it were whole"
        text = f"run_round({seed}), case {case}: {what}"
        defects.append(rounds.Defect(law, text, detail))
  return rounds.Round(_CASES, tuple(defects))


def _save_steps(
  folder: pathlib.Path, generator: np.random.Generator
) -> list[tuple[list[np.ndarray], checkpoint.Log]]:
  """Returns the trees and logs of steps that it has saved."""
  store = checkpoint.CheckpointStore(folder)
  shapes = [
    tuple(generator.integers(0, 5, generator.integers(0, 4)))
    for _ in range(generator.integers(1, 5))
  ]
  kinds = generator.choice(len(_DTYPES), len(shapes))
  saved = []
  log = checkpoint.Log([], [])
  for _ in range(_STEPS):
    log = checkpoint.Log([*log.loss, generator.random()], [*log.step_ms, 1.0])
    tree = [
      np.asarray(generator.integers(0, 100, shape)).astype(_DTYPES[kind])
      for shape, kind in zip(shapes, kinds, strict=True)
    ]
    store.save(tree, log)
    saved.append((tree, log))
  return saved


def _check_run(
  folder: pathlib.Path,
  saved: list[tuple[list[np.ndarray], checkpoint.Log]],
  chooser: random.Random,
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
      tree, log = checkpoint.CheckpointStore(broken).restore(like)
    except console.JobError as error:
      return f"it is refused as a whole: {error}", what
  step = max(whole, default=0)
  wanted, wanted_log = (
    saved[step - 1] if step else (like, checkpoint.Log([], []))
  )
  if log != wanted_log:
    return f"the log has {len(log.loss)} steps, not {step}", what
  for found, expected in zip(tree, wanted, strict=True):
    if found.tobytes() != expected.tobytes():
      return f"step {step} has {found}, not {expected}", what
  if _STEPS not in whole and "is broken" not in said.getvalue():
    return f"no line says so: {said.getvalue()!r}", what
  return "", what


def _check_lines(
  path: pathlib.Path, lines: list[dict], chooser: random.Random
) -> tuple[str, str]:
  """Returns what is wrong with broken lines, and what was broken."""
  whole = path.read_bytes()
  what = _break_file(path, chooser)
  found = workdir.read_sealed(path)
  path.write_bytes(whole)
  kept = [line for line in found if line is not None]
  wrong = [line for line in kept if line not in lines]
  return (f"it has {wrong[0]}" if wrong else ""), what


def _break_file(path: pathlib.Path, chooser: random.Random) -> str:
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


def _flip_bit(data: bytes, chooser: random.Random) -> bytes:
  flipped = bytearray(data)
  flipped[chooser.randrange(len(data))] ^= 1 << chooser.randrange(8)
  return bytes(flipped)


def _zero_bytes(data: bytes, chooser: random.Random) -> bytes:
  begin = chooser.randrange(len(data))
  size = chooser.randrange(1, 64)
  return (
    data[:begin] + bytes(len(data[begin : begin + size])) + data[begin + size :]
  )


def _swap_halves(data: bytes, chooser: random.Random) -> bytes:
  cut = chooser.randrange(len(data))
  return data[cut:] + data[:cut]


_WAYS: dict[str, Callable[[bytes, random.Random], bytes]] = {
  "flip": _flip_bit,
  "cut": lambda data, chooser: data[: chooser.randrange(len(data))],
  "empty": lambda data, chooser: b"",
  "append": lambda data, chooser: data + chooser.randbytes(8),
  "zeros": _zero_bytes,
  "swap": _swap_halves,
  "delete": lambda data, chooser: b"",
}
