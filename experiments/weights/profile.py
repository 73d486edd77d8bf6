"""Time of a step by its parts, measured here for every case.

Cases alternate, so that a slow minute of the machine falls on all alike. A step
that is timed by parts waits for every part: nothing overlaps.
"""

import collections
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.weights import trainer
from experiments.weights.cases import (
  control_interval,
  get_case,
  make_controller,
)
from experiments.weights.context import RunContext

PARTS = (
  *("pack", "send", "unpack", "forward", "backward", "return"),
  *("update", "norm"),
)
"""Parts of a step.

Gradients are packed in `backward` and unpacked in `update`. `norm` is the
controller and its input (norms, for AWP), per step.
"""

BITPACK = "truncate1"
"""The case that stands for the paper's Bitpack; always profiled."""


class Profile(NamedTuple):
  """Times and bytes of a step of one case."""

  case: str  # Name of the case.
  ms: dict[str, float]  # Median milliseconds of each of `PARTS`.
  # Median milliseconds of a whole step without norms, timed at once.
  step_ms: float
  # `norm` per step over `pack` of `BITPACK` in the same round.
  norm_ratio: float
  # `norm` over the step, in per cent: median over the rounds.
  norm_share: float
  pack_ratio: float  # `pack` over that of `BITPACK` in the same round.
  plain_bytes: int  # Bytes of the parameters as float32.
  sent_bytes: int  # Bytes sent to the device.
  returned_bytes: int  # Bytes returned to the host.
  sends: int  # Number of transfers to the device.
  returns: int  # Number of transfers to the host.
  noise_ms: float  # Sample standard deviation of `step_ms` over the rounds.


def profile_steps(
  context: RunContext,
  levels: dict[str, int],
  on_round: Callable[[], None] = lambda: None,
) -> list[Profile]:
  """Profiles a step of every case of a configuration."""
  cases = context.config.cases
  profilers = {
    name: _Profiler(context, name, levels.get(name, 0))
    for name in dict.fromkeys((*cases, BITPACK))
  }
  for _ in range(context.config.profile_rounds + 1):
    for profiler in profilers.values():
      profiler.run_round()
      on_round()
  return [profilers[name].summarize(profilers[BITPACK]) for name in cases]


class _PartTimer:
  """Hook of the store that times each part of a step until it is done."""

  def __init__(self) -> None:
    self.ms: dict[str, float] = collections.defaultdict(float)
    self.arrays: dict[str, int] = collections.defaultdict(int)

  def __call__(self, name: str, part: Callable[..., Any], *args: Any) -> Any:
    begin = time.perf_counter()
    out = jax.block_until_ready(part(*args))
    self.ms[name] += 1e3 * (time.perf_counter() - begin)
    self.arrays[name] += len(jax.tree.leaves(out))
    return out


class _Profiler:
  """Store and timings of one case between two rounds."""

  def __init__(self, context: RunContext, name: str, level: int):
    config, case = context.config, get_case(name)
    size = config.profile_size
    model = context.make_model(0, size=size, width=config.profile_width)
    self.name, self.level = name, level
    self.store = trainer.make_store(case, context.tx, model)
    self.state = self.store.init(model.params, model.stats)
    # Static cases show the cost that AWP would have for them.
    self._case = case if case.control else get_case("awp")
    controller = make_controller(self._case, config)
    self.control = jax.jit(controller.init)(self.store.norms(self.state))
    self._update = jax.jit(controller.update)
    self._interval = control_interval(self._case, config)
    random = np.random.default_rng(0)
    batch, channels = config.profile_batch, context.data.train.pixels.shape[-1]
    pixels = random.standard_normal((batch, size, size, channels), np.float32)
    labels = random.integers(0, context.data.classes, batch, np.int32)
    self._batch = {"pixels": pixels, "labels": labels}
    self.rounds: list[dict[str, float]] = []
    self.arrays: dict[str, int] = {}
    self.sent_bytes = self.returned_bytes = 0

  def run_round(self) -> None:
    """Times one whole step, the controller, and one step by parts."""
    times = {"step": _time_ms(self._step)}
    times["norm"] = _time_ms(self._update_control) / self._interval
    timer = _PartTimer()
    before = self.state.sent_bytes, self.state.returned_bytes
    self._step(run_op=timer)
    self.sent_bytes = int(self.state.sent_bytes - before[0])
    self.returned_bytes = int(self.state.returned_bytes - before[1])
    self.arrays = timer.arrays
    self.rounds.append(times | timer.ms)

  def summarize(self, bitpack: "_Profiler") -> Profile:
    """Returns the medians of all rounds but the first, which compiles."""
    rounds, others = self.rounds[1:], bitpack.rounds[1:]
    pairs = list(zip(rounds, others, strict=True))
    steps = [r["step"] for r in rounds]
    return Profile(
      case=self.name,
      ms={part: statistics.median(r[part] for r in rounds) for part in PARTS},
      step_ms=statistics.median(steps),
      norm_share=statistics.median(100 * r["norm"] / r["step"] for r in rounds),
      norm_ratio=statistics.median(r["norm"] / o["pack"] for r, o in pairs),
      pack_ratio=statistics.median(r["pack"] / o["pack"] for r, o in pairs),
      plain_bytes=self.store.plain_bytes(self.state.params),
      sent_bytes=self.sent_bytes,
      returned_bytes=self.returned_bytes,
      sends=self.arrays["send"],
      returns=self.arrays["return"],
      noise_ms=statistics.stdev(steps) if len(steps) > 1 else 0.0,
    )

  def _step(self, **options: Any) -> None:
    self.state, loss = self.store.step(
      self.state, self._batch, self.level, **options
    )
    jax.block_until_ready((self.state.params, loss))

  def _update_control(self) -> None:
    signal = trainer.make_signal(self._case, self.store, self.state, self.level)
    self.control = self._update(signal, self.control)
    np.asarray(self.control.history.level)


def _time_ms(work: Callable[[], None]) -> float:
  begin = time.perf_counter()
  work()
  return 1e3 * (time.perf_counter() - begin)
