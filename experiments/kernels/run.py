"""Checks, timings and compilations of many ops, in threads where that helps."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import jax
import rich.progress

from experiments.kernels import cases, check, compiled, rows, speed
from experiments.kernels.ops import IMPLEMENTATIONS, Op, make_shape

T = TypeVar("T")


def time_all(
  ops: Sequence[Op], max_bytes: int, repeats: int, seconds: float
) -> list[speed.Speed]:
  """Times ops on all sizes up to `max_bytes`."""
  end = time.monotonic() + seconds
  speeds: list[speed.Speed] = []
  for size in (size for size in cases.SIZES if size <= max_bytes):
    title, shape = rows.format_size(size), make_shape(size)
    like = jax.ShapeDtypeStruct(shape, "float32")
    compile_one = lambda op, like=like: speed.compile_op(op, like)
    if time.monotonic() < end:
      x = jax.random.normal(jax.random.key(0), shape)
      prepared = _map_threads(compile_one, ops, f"compile {title}")
      for each in _show_progress(prepared, f"time {title}", len(prepared)):
        if time.monotonic() < end:
          speeds += speed.time_op(each, x, repeats)
    done = {(s.op, s.size_bytes) for s in speeds}
    speeds += [
      speed.Speed(op.name, size, name, reason="no time left")
      for op in ops
      if (op.name, size) not in done
      for name in speed.list_implementations()
    ]
  return speeds


def check_all(
  ops: Sequence[Op], seed: int, every_case: bool
) -> list[check.Outcome]:
  """Checks every implementation that runs on this device."""
  names = speed.list_implementations()
  check_one = lambda op: list(check.check_op(op, names, seed, every_case))
  return [o for found in _map_threads(check_one, ops, "check") for o in found]


def compile_all(
  ops: Sequence[Op], target: str
) -> list[tuple[str, str, compiled.Figures | str]]:
  """Compiles every implementation of ops for a GPU, on the host."""

  def compile_one(job: tuple[Op, str]) -> compiled.Figures | str:
    try:
      return compiled.compile_op(*job, target, cases.COMPILED_BYTES)
    except NotImplementedError as reason:
      return str(reason)

  jobs = [(op, name) for op in ops for name in IMPLEMENTATIONS]
  found = _map_threads(compile_one, jobs, "compile")
  return [
    (op.name, name, figures)
    for (op, name), figures in zip(jobs, found, strict=True)
  ]


def _map_threads(
  fn: Callable[..., T], jobs: Sequence, description: str
) -> list[T]:
  """Runs jobs in threads, because they mostly compile, outside of Python."""
  with ThreadPoolExecutor(os.cpu_count()) as threads:
    return list(_show_progress(threads.map(fn, jobs), description, len(jobs)))


def _show_progress(jobs: Iterable, description: str, total: int) -> Iterable:
  # Drawn between jobs: a thread that redraws would be part of what is timed.
  return rich.progress.track(jobs, description, total, auto_refresh=False)
