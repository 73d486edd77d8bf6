"""Generated exchanges of gradients, held to the laws of their pages.

A round draws one exchange: workers, codec, shapes, dtypes, weights and policy.
It compiles its update once and runs several steps, some with values that are
not finite. The reference is numpy in double precision: what came in plus what
was remembered is what was sent plus what is remembered.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from experiments.fuzz import exchange_programs
from experiments.fuzz.exchange_programs import Programs, Result, Setup
from experiments.fuzz.rounds import Defect, Round
from jaxmotion import codecs
from jaxmotion.collectives.extend import is_sharded, row_like

_STEPS = ("finite", "finite", "nan", "finite", "inf", "weight", "finite")


def run_round(seed: int) -> Round:
  """Draws one exchange and checks its laws."""
  return check_exchange(
    exchange_programs.draw_setup(np.random.default_rng(seed)), seed
  )


def check_exchange(setup: Setup, seed: int) -> Round:
  """Runs several updates of an exchange and checks the laws of each."""
  case = f"check_exchange({setup!r}, {seed})"
  try:
    programs = Programs(setup)
  except Exception as error:  # Every exchange that is drawn is a valid one.
    detail = f"{type(error).__name__}: {error}"[:600]
    return Round(1, (Defect("an exchange compiles", case, detail),))
  found = [Defect(law, case, detail) for law, detail in _check_bytes(programs)]
  rng = np.random.default_rng((seed, 1))
  state, cases = programs.start, 1
  for i, kind in enumerate(_STEPS):
    if kind == "weight" and not setup.weighted:
      continue
    checker = _Step(programs, kind, rng, state)
    found += [
      Defect(law, f"{case}, step {i} ({kind})", detail)
      for law, detail in checker.check()
    ]
    state, cases = checker.result.state, cases + 1
  return Round(cases, tuple(found))


def _check_bytes(programs: Programs) -> Iterator[tuple[str, str]]:
  """Yields where predicted, traced and compiled bytes differ."""
  setup = programs.setup
  for level in range(len(setup.levels)):
    traced = programs.traced_bytes[level]
    compiled = programs.compiled_bytes[level]
    # XLA:CPU sums bfloat16 as float32: the one documented exception.
    sums = ("all_reduce", "reduce_scatter")
    widened = math.fsum(
      move.wire_bytes
      * (2 if move.dtype == "bfloat16" and move.op in sums else 1)
      for move in traced.moves
    )
    # The scale or seed of an empty array decodes to nothing, so XLA, or JAX
    # before it, may drop it.
    unused = 8 * setup.hosts * sum(0 in shape for shape in setup.shapes)
    dropped = widened - compiled.total_bytes
    if not 0 <= dropped <= unused:
      yield (
        "traced bytes are the compiled program's",
        f"level {level}: {widened} for {traced}, {compiled}",
      )
    predicted = exchange_programs.predict_bytes(programs, level)
    if not setup.devices:
      scalars = (setup.nonfinite == "skip") + (
        setup.weighted and setup.op == "mean"
      )
      predicted += scalars * 4 * 2 * (setup.hosts - 1) / setup.hosts
    between = traced.per_axis().get(("host",), 0.0)
    rounding = 1e-6 * max(between, 1)
    if not -rounding <= predicted - between <= unused + rounding:
      yield (
        "predicted bytes are the traced ones",
        f"level {level}: {predicted} for {traced}",
      )


class _Step:
  """One update and the laws that it must keep."""

  def __init__(
    self, programs: Programs, kind: str, rng: np.random.Generator, state: Any
  ) -> None:
    self.programs, self.setup, self.kind = programs, programs.setup, kind
    self.before = state
    self.level = int(rng.integers(len(self.setup.levels)))
    self.clean = exchange_programs.draw_values(self.setup, rng)
    self.clean_weights = exchange_programs.draw_weights(self.setup, rng)
    self.x, self.weights = self.clean, self.clean_weights
    self.spoiled: str = ""
    if kind == "weight":
      self.weights = self.weights.copy()
      worker = rng.integers(self.setup.workers)
      self.weights[worker] = rng.choice((np.nan, np.inf))
      self.clean_weights = np.where(
        np.isfinite(self.weights), self.weights, 0
      ).astype(np.float32)
    elif kind != "finite":
      self._spoil(rng)
    self.result = self._update(self.x, self.weights)

  def _spoil(self, rng: np.random.Generator) -> None:
    """Puts a NaN or infinity into an array, a zero into its clean copy."""
    names = [name for name, x in self.x.items() if x.size]
    if not names:
      return
    name = self.spoiled = str(rng.choice(names))
    bad = self.x[name].copy()
    position = rng.integers(bad.size)
    bad.reshape(-1)[position] = np.nan if self.kind == "nan" else np.inf
    zeroed = bad.copy()
    zeroed.reshape(-1)[position] = 0
    self.x = self.x | {name: bad}
    self.clean = self.clean | {name: zeroed}
    if self.setup.weighted:
      # Zero times NaN is NaN too, but zero times what a codec drops is not.
      self.weights = np.where(self.weights == 0, 1, self.weights)
      self.clean_weights = self.weights

  def _update(self, x: Any, weights: np.ndarray) -> Result:
    return self.programs.update(x, self.before, weights, self.level)

  def check(self) -> Iterator[tuple[str, str]]:
    """Yields every law that is broken, and how."""
    result, setup = self.result, self.setup
    if result.copies != 1:
      yield "all workers hold the same bits", f"{result.copies} results"
    for name, like in setup.likes.items():
      y = result.y[name]
      if (y.shape, y.dtype) != (like.shape, like.dtype):
        yield "an update has the gradient's type", f"{name}: {y.dtype}{y.shape}"
    is_bad = self.kind == "weight" or self.spoiled != ""
    skips = is_bad and setup.nonfinite == "skip"
    if int(result.state.skipped) - int(self.before.skipped) != skips:
      yield "skipped updates are counted", f"{result.state.skipped}"
    if int(result.state.count) - int(self.before.count) != 1:
      yield "updates are counted", f"{result.state.count}"
    if is_bad:
      yield from self._check_policy()
    else:
      yield from self._check_values()

  def _check_policy(self) -> Iterator[tuple[str, str]]:
    """Yields where an update of non-finite values breaks its policy."""
    y, policy = self.result.y, self.setup.nonfinite
    law = f"{policy} does what its page says"
    if policy == "skip":
      if any(np.asarray(a, np.float64).any() for a in y.values()):
        yield law, "an update is not zero"
      old, new = self.before.codec_state, self.result.state.codec_state
      if _bits(old) != _bits(new):
        yield law, "codec state changed"
      return
    expected = self._update(self.clean, self.clean_weights)
    if policy == "zero":
      same = (expected.y, expected.state.codec_state)
      if _bits(same) != _bits((y, self.result.state.codec_state)):
        yield law, "the update is not that of zeros in their place"
      return
    touched = [self.spoiled] if self.spoiled else list(y)
    for name in touched:
      if self._may_drop(name):
        continue
      if y[name].size and np.isfinite(np.asarray(y[name], np.float64)).all():
        yield law, f"{name} is finite: the element did not reach the workers"
    divided = self.programs.divided[self.level]
    for group in divided.leaf_groups:
      names = [divided.leaves[i][0] for i in group.leaves]
      if not set(names) & set(touched):
        for name in names:
          if _bits(y[name]) != _bits(expected.y[name]):
            yield law, f"{name} changed with another array's element"
    for errors in self.programs.errors(self.result.state):
      for error in errors or ():
        if error is not None and not np.isfinite(error).all():
          yield "error memory stays finite", f"{error.shape}"

  def _may_drop(self, name: str) -> bool:
    """Whether a leaf's codec leaves out elements whatever they are."""
    divided = self.programs.divided[self.level]
    return any(
      name in [divided.leaves[i][0] for i in group.leaves]
      and "random_k" in repr(group.codec)
      for group in divided.leaf_groups
    )

  def _check_values(self) -> Iterator[tuple[str, str]]:
    """Yields where an update of finite values breaks a law."""
    setup = self.setup
    for name, y in self.result.y.items():
      if not np.isfinite(np.asarray(y, np.float64)).all():
        yield "finite gradients have a finite mean", name
        return
    if setup.local_codec is not None:
      return
    plain = setup.codec == codecs.identity() and not (
      setup.weighted or setup.devices
    )
    # An exchange adds up float16 in float32; the uncompressed one may overflow.
    if (
      plain
      and "float16" not in setup.dtypes
      and _bits(self.programs.plain(self.x)) != _bits(self.result.y)
    ):
      yield "identity is the uncompressed collective", "other bits"
    yield from self._check_conservation()
    if not setup.devices and not all(c.has_state for c in setup.levels):
      yield from self._check_model()

  def _shares(self) -> np.ndarray:
    """Returns each worker's factor, float32 as the exchange has it."""
    if not self.setup.weighted:
      return np.ones(self.setup.workers, np.float32)
    w = self.weights
    if self.setup.op == "sum":
      return w
    mean = (w / np.float32(self.setup.workers)).sum(dtype=np.float32)
    safe = np.where(w == 0, np.float32(1), mean)
    return np.where(w == 0, 0, w / safe).astype(np.float32)

  def _check_model(self) -> Iterator[tuple[str, str]]:
    """Yields where updates differ from means of what workers decode."""
    divided = self.programs.divided[self.level]
    xs = []
    for group, like in zip(
      divided.leaf_groups, divided.array_likes(), strict=True
    ):
      x = np.concatenate(
        [
          self.x[divided.leaves[i][0]].reshape(self.setup.workers, -1)
          for i in group.leaves
        ],
        axis=1,
      ).reshape(self.setup.workers, *like.shape)
      x = x.astype(np.float32)
      if self.setup.weighted:
        x = x * self._shares().reshape(-1, *[1] * len(like.shape))
      xs.append(x.astype(like.dtype) if group.codec.keeps_dtype else x)
    model = self.programs.cached_model(
      self.level, exchange_programs.model_means
    )
    means = jax.tree.map(np.asarray, model(xs, np.int32(self.before.count)))
    for group, mean in zip(divided.leaf_groups, means, strict=True):
      if mean is None:
        continue
      names = [divided.leaves[i][0] for i in group.leaves]
      y = np.concatenate(
        [self.result.y[name].astype(np.float64).reshape(-1) for name in names]
      )
      y = y / self.setup.workers if self.setup.op == "sum" else y
      variants = mean.astype(np.float64).reshape(len(mean), -1)
      allowed = _roundings(self.result.y[names[0]].dtype, variants)
      misses = (np.abs(variants - y).min(0) > allowed).sum() if y.size else 0
      few = 0.02 * y.size + 2 if len(mean) > 1 or self.setup.weighted else 0
      if misses > few:
        yield (
          "the result is the mean of what was decoded",
          f"{names}: {misses} of {y.size} differ, the most by "
          f"{np.abs(variants - y).min(0).max():g}",
        )

  def _check_conservation(self) -> Iterator[tuple[str, str]]:
    """Yields where error memory loses or gains something."""
    old = self.programs.errors(self.before)
    new = self.programs.errors(self.result.state)
    devices = max(self.setup.devices, 1)
    for device in range(devices):
      came = _HostArrays(self, device)
      for i, (was, now) in enumerate(zip(old, new, strict=True)):
        if was is None:
          continue
        detail = came.find_loss(i, was, now)
        if detail:
          yield "sent and remembered is what came and was remembered", detail


class _HostArrays:
  """The arrays that the devices with one index exchange between hosts."""

  def __init__(self, step: _Step, device: int) -> None:
    self._step, self._device = step, device
    setup = step.setup
    self._hosts, self._devices = setup.hosts, max(setup.devices, 1)
    self._divided = step.programs.divided[step.level]
    self._x, self._y, self._is_real = {}, {}, {}
    shares = step._shares().astype(np.float64)
    for name, like in setup.likes.items():
      x = step.x[name].astype(np.float64)
      x = x * shares.reshape(-1, *[1] * len(like.shape))
      x = x.reshape(self._hosts, self._devices, *like.shape)
      local = x.mean(1) if setup.op == "mean" else x.sum(1)
      y = step.result.y[name].astype(np.float64)
      y = y / self._hosts if setup.op == "sum" else y
      is_real = np.ones(like.shape, bool)
      if setup.devices and is_sharded(like, self._devices):
        local = np.stack([self._shard(a, like) for a in local])
        y, is_real = self._shard(y, like), self._shard(is_real, like)
      self._x[name], self._y[name] = local, y
      self._is_real[name] = is_real

  def _shard(self, x: np.ndarray, like: Any) -> np.ndarray:
    row = row_like(like, self._devices)
    size = int(np.prod(row.shape))
    flat = np.pad(x.reshape(-1), (0, size * self._devices - x.size))
    return flat.reshape(self._devices, *row.shape)[self._device]

  def find_loss(self, index: int, was: Any, now: Any) -> str | None:
    """Returns where an array lost or gained something, or None."""
    group = self._divided.leaf_groups[index]
    names = [self._divided.leaves[i][0] for i in group.leaves]
    if (
      self._devices > 1
      and self._device
      and any(
        not is_sharded(self._step.setup.likes[name], self._devices)
        for name in names
      )
    ):
      return None  # All devices take the first one's result.
    codec = group.codec
    if not isinstance(codec, codecs.feedback):
      return None
    x = np.concatenate(
      [self._x[name].reshape(self._hosts, -1) for name in names], axis=1
    )
    y = np.concatenate([self._y[name].reshape(-1) for name in names])
    first_was, second_was = self._pick(was)
    first_now, second_now = self._pick(now)
    came = x.mean(0) + codec.decay * self._join(first_was.mean(0), y.size)
    left = self._join(first_now.mean(0), y.size)
    if (
      second_was is not None
      and second_now is not None
      and codec.form == "local"
    ):
      came = came + codec.decay * self._join(second_was, y.size)
      left = left + self._join(second_now, y.size)
    most = max(
      np.abs(a).max(initial=0) for a in (x, first_was, first_now, y, came)
    )
    dtype = self._step.result.y[names[0]].dtype
    allowed = _roundings(dtype, most * np.ones(1))
    # Padding may decode to anything; nobody receives it.
    is_real = np.concatenate([self._is_real[n].reshape(-1) for n in names])
    lost = np.where(is_real, np.abs(came - left - y), 0.0)
    if (lost <= allowed).all():
      return None
    return (
      f"{names} of device {self._device}, {group.codec!r}: "
      f"{(lost > allowed).sum()} of {y.size} differ, the most by "
      f"{lost.max():g} where values are up to {most:g}"
    )

  def _pick(self, errors: Any) -> tuple[np.ndarray, np.ndarray | None]:
    first, second = errors
    own = slice(self._device, None, self._devices)
    first = first[own].astype(np.float64)
    return first, None if second is None else second[own].astype(np.float64)

  def _join(self, rows: np.ndarray, size: int) -> np.ndarray:
    return rows.reshape(-1)[:size]


def _roundings(dtype: Any, values: np.ndarray) -> float:
  """Returns what roundings may change of values of a dtype."""
  most = float(np.abs(values).max(initial=0))
  eps = float(jax.numpy.finfo(dtype).eps)
  return most * (eps * 2 if eps > 1e-6 else 3e-6) + 1e-30


def _bits(tree: Any) -> list[bytes]:
  return [np.asarray(a).tobytes() for a in jax.tree.leaves(tree)]
