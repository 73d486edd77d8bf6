"""Where the time of a step goes, by case, measured here.

Cases take turns, so that a slow minute of the machine falls on all alike. A
step that is taken apart waits for every piece: nothing overlaps.
"""

import collections
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.weights import trainer
from experiments.weights.cases import control_every, get_case, make_controller

PIECES = (
  "pack",
  "send",
  "unpack",
  "forward",
  "backward",
  "return",
  "update",
  "norm",
)
"""What a step is taken apart into. Gradients are packed in `backward` and
unpacked in `update`; `norm` is the controller and what it is told (norms, for
AWP), a step."""

BITPACK = "truncate1"
"""The case that stands for the paper's Bitpack: it takes part even if it is not
asked for."""


class Profile(NamedTuple):
  """What a step of one case takes.

  Attributes:
    case: its name.
    ms: median milliseconds of each of `PIECES`.
    step_ms: median milliseconds of a whole step, not taken apart and without
      norms.
    norm_ratio: `norm` a step, over `pack` of `BITPACK` in the same round.
    norm_share: `norm` of a step, in per cent: median over the rounds.
    pack_ratio: `pack`, over that of `BITPACK` in the same round.
    plain_bytes: of the parameters as float32.
    sent_bytes: to the device.
    returned_bytes: to the host.
    sends: transfers to the device.
    returns: transfers to the host.
    noise_ms: sample standard deviation of `step_ms` over the rounds.
  """

  case: str
  ms: dict[str, float]
  step_ms: float
  norm_ratio: float
  norm_share: float
  pack_ratio: float
  plain_bytes: int
  sent_bytes: int
  returned_bytes: int
  sends: int
  returns: int
  noise_ms: float


class _Timer:
  """Is called by the store for every piece of work; waits for it."""

  def __init__(self) -> None:
    self.ms: dict[str, float] = collections.defaultdict(float)
    self.arrays: dict[str, int] = collections.defaultdict(int)

  def __call__(self, name: str, piece: Callable[..., Any], *args: Any) -> Any:
    begin = time.perf_counter()
    out = jax.block_until_ready(piece(*args))
    self.ms[name] += 1e3 * (time.perf_counter() - begin)
    self.arrays[name] += len(jax.tree.leaves(out))
    return out


class _Bench:
  """One case between two rounds."""

  def __init__(self, setup: trainer.Setup, name: str, level: int):
    config, case = setup.config, get_case(name)
    size = config.profile_size
    model = setup.model(0, size=size, width=config.profile_width)
    self.name, self.level = name, level
    self.store = trainer.make_store(case, setup.tx, model)
    self.state = self.store.init(model.params, model.stats)
    # Static cases show what AWP would cost them.
    self._case = case if case.control else get_case("awp")
    controller = make_controller(self._case, config)
    self.control = jax.jit(controller.init)(self.store.norms(self.state))
    self._update = jax.jit(controller.update)
    self._every = control_every(self._case, config)
    random = np.random.default_rng(0)
    batch, channels = config.profile_batch, setup.data.train.pixels.shape[-1]
    pixels = random.standard_normal((batch, size, size, channels), np.float32)
    labels = random.integers(0, setup.data.classes, batch, np.int32)
    self._batch = {"pixels": pixels, "labels": labels}
    self.rounds: list[dict[str, float]] = []
    self.arrays: dict[str, int] = {}
    self.sent = self.returned = 0

  def round(self) -> None:
    """Times one step as it is, one taken apart, and the norms."""
    found = {"step": self._timed(self._step)}
    found["norm"] = self._timed(self._norm) / self._every
    timer = _Timer()
    before = self.state.sent_bytes, self.state.returned_bytes
    self._step(run_op=timer)
    self.sent = int(self.state.sent_bytes - before[0])
    self.returned = int(self.state.returned_bytes - before[1])
    self.arrays = timer.arrays
    self.rounds.append(found | timer.ms)

  def profile(self, bitpack: "_Bench") -> Profile:
    """The medians of the rounds but the first, which compiles."""
    rounds, others = self.rounds[1:], bitpack.rounds[1:]
    pairs = list(zip(rounds, others, strict=True))
    steps = [r["step"] for r in rounds]
    return Profile(
      case=self.name,
      ms={p: statistics.median(r[p] for r in rounds) for p in PIECES},
      step_ms=statistics.median(steps),
      norm_share=statistics.median(100 * r["norm"] / r["step"] for r in rounds),
      norm_ratio=statistics.median(r["norm"] / o["pack"] for r, o in pairs),
      pack_ratio=statistics.median(r["pack"] / o["pack"] for r, o in pairs),
      plain_bytes=self.store.plain_bytes(self.state.params),
      sent_bytes=self.sent,
      returned_bytes=self.returned,
      sends=self.arrays["send"],
      returns=self.arrays["return"],
      noise_ms=statistics.stdev(steps) if len(steps) > 1 else 0.0,
    )

  def _step(self, **options: Any) -> None:
    self.state, loss = self.store.step(
      self.state, self._batch, self.level, **options
    )
    jax.block_until_ready((self.state.params, loss))

  def _norm(self) -> None:
    signal = trainer.make_signal(self._case, self.store, self.state, self.level)
    self.control = self._update(signal, self.control)
    np.asarray(self.control.history.level)

  def _timed(self, work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begin)


def measure(
  setup: trainer.Setup,
  levels: dict[str, int],
  on_round: Callable[[], None] = lambda: None,
) -> list[Profile]:
  """Takes the step of every case of a configuration apart.

  Args:
    setup: with `profile_width`, `profile_size`, `profile_batch` and
      `profile_rounds` in its configuration.
    levels: of adaptive cases; 0 for the others.
    on_round: called when a case has had a turn.
  """
  cases = setup.config.cases
  benches = {
    name: _Bench(setup, name, levels.get(name, 0))
    for name in dict.fromkeys((*cases, BITPACK))
  }
  for _ in range(setup.config.profile_rounds + 1):
    for bench in benches.values():
      bench.round()
      on_round()
  return [benches[name].profile(benches[BITPACK]) for name in cases]
