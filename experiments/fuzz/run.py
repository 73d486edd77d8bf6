"""Subjects of generated cases: rounds in several processes, rows and table."""

import dataclasses
import heapq
import multiprocessing
import multiprocessing.connection
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

import jax

from experiments.common import names, records, tables
from experiments.common.records import Measured, Row
from experiments.common.tables import Table
from experiments.fuzz import codecs, exchanges, fault_files, files, programs
from experiments.fuzz.rounds import Defect, Round

RunRound = Callable[[int], Round]

_EXIT_S = 10.0  # Seconds that a worker gets to end after its last round.


@dataclasses.dataclass
class Tally:
  """Sums over all rounds of one subject."""

  rounds: int = 0  # Rounds that ended, were stopped or lost their process.
  cases: int = 0  # Cases that those rounds checked.
  seconds: float = 0.0  # Time in those rounds, summed over processes.
  # Found in the order in which rounds ended.
  defects: list[Defect] = dataclasses.field(default_factory=list)


class _Worker:
  """A process that runs one round at a time."""

  def __init__(self, subjects: Mapping[str, RunRound]):
    # A forked process would share locks and threads of XLA.
    context = multiprocessing.get_context("spawn")
    self.pipe, theirs = context.Pipe()
    self.process = context.Process(
      target=_serve_rounds, args=(theirs, dict(subjects)), daemon=True
    )
    self.process.start()
    theirs.close()  # The end of the process then ends `recv`.
    self._is_ready = False
    self.job: tuple[str, int] | None = None
    self.started = 0.0

  def begin(self, subject: str, seed: int) -> None:
    """Starts one round, whose time does not include imports."""
    if not self._is_ready:
      self._is_ready = self.pipe.recv()
    self.job, self.started = (subject, seed), time.monotonic()
    self.pipe.send(self.job)

  def stop(self) -> None:
    """Ends the process, by force if it does not end by itself."""
    self.pipe.close()
    self.process.join(_EXIT_S if self.job is None else 0.0)
    self.process.kill()
    self.process.join()


def run_subjects(
  subjects: Mapping[str, RunRound],
  seconds: float,
  *,
  shares: Mapping[str, float] | None = None,
  rounds: int | None = None,
  first_seed: int = 0,
  processes: int = 2,
  limit_s: float = 300.0,
  report: Callable[[Mapping[str, Tally], Defect | None], None] | None = None,
) -> dict[str, Tally]:
  """Runs rounds of each subject and shares the time between subjects."""
  # A round that raises, that ends its process or that takes too long counts as
  # a defect. A process that ended is started again.
  # `limit_s`: longest time of a round, in seconds.
  tallies = {name: Tally() for name in subjects}
  shares = {name: 1.0 for name in subjects} | dict(shares or {})

  def cost_so_far(name: str) -> float:
    return tallies[name].seconds / shares[name]

  # The subject with the least of its share so far comes first.
  queue = [(0.0, name, first_seed) for name in subjects]
  heapq.heapify(queue)
  workers = [_Worker(subjects) for _ in range(processes)]

  def begin_next(worker: _Worker) -> None:
    if not queue:
      return
    _, name, seed = heapq.heappop(queue)
    # Time that a running round will take is not known yet: count its start.
    busy = sum(other.job is not None for other in workers)
    if rounds is None or seed + 1 - first_seed < rounds:
      cost = cost_so_far(name) + busy * 1e-3
      heapq.heappush(queue, (cost, name, seed + 1))
    worker.begin(name, seed)

  try:
    for worker in workers:
      begin_next(worker)
    end = time.monotonic() + seconds  # Imports are over and do not count.
    while any(worker.job for worker in workers):
      busy = [worker for worker in workers if worker.job]
      first = min(worker.started for worker in busy) + limit_s
      multiprocessing.connection.wait(
        [worker.pipe for worker in busy], max(0.0, first - time.monotonic())
      )
      for worker in busy:
        outcome = _take_outcome(worker, limit_s)
        if outcome is None:
          continue
        assert worker.job is not None
        name, _ = worker.job
        tally = tallies[name]
        tally.rounds += 1
        tally.cases += outcome.cases
        tally.seconds += time.monotonic() - worker.started
        tally.defects += outcome.defects
        queue[:] = [(cost_so_far(n), n, seed) for _, n, seed in queue]
        heapq.heapify(queue)
        if report:
          for defect in [*outcome.defects, None]:
            report(tallies, defect)
        worker.job = None
        if not worker.process.is_alive():
          workers[workers.index(worker)] = worker = _Worker(subjects)
        if time.monotonic() < end:
          begin_next(worker)
  finally:
    for worker in workers:
      worker.stop()
  return tallies


def run_guarded(run_round: RunRound, name: str, seed: int) -> Round:
  """Runs one round; an error becomes a defect."""
  try:
    return run_round(seed)
  except Exception:
    return _lost_round(
      "a case raises only documented errors", name, seed, traceback.format_exc()
    )


def _take_outcome(worker: _Worker, limit_s: float) -> Round | None:
  """Returns the round of a worker, or None while it runs."""
  assert worker.job is not None
  name, seed = worker.job
  if worker.pipe.poll():
    try:
      return worker.pipe.recv()
    except (EOFError, OSError):
      worker.process.join()
      code = worker.process.exitcode
      return _lost_round(
        "a case never ends the process", name, seed, f"exit code {code}"
      )
  if time.monotonic() - worker.started < limit_s:
    return None
  worker.process.kill()
  worker.process.join()
  return _lost_round(
    "a round ends in time", name, seed, f"it ran for more than {limit_s:g} s"
  )


def _lost_round(law: str, name: str, seed: int, detail: str) -> Round:
  return Round(0, (Defect(law, f"--round={name}:{seed}", detail),))


def _serve_rounds(
  pipe: multiprocessing.connection.Connection, subjects: dict[str, RunRound]
) -> None:
  """Runs the rounds that arrive until the other end of the pipe is closed."""
  pipe.send(True)
  while True:
    try:
      name, seed = pipe.recv()
    except EOFError:
      return
    pipe.send(run_guarded(subjects[name], name, seed))
    jax.clear_caches()  # Hundreds of programs a round would fill the memory.


SUBJECTS: dict[str, RunRound] = {
  "checkpoints": fault_files.run_round,
  "codecs": codecs.run_round,
  "exchanges": exchanges.run_round,
  "files": files.run_round,
  "programs": programs.run_round,
}

# Relative times. A program costs about 1 s of compilation, a codec's case 6 ms.
SHARES: dict[str, float] = {
  "checkpoints": 0.7,
  "codecs": 3.6,
  "exchanges": 2.0,
  "files": 0.7,
  "programs": 13.0,
}


def parse_round(text: str) -> tuple[str, int]:
  """Returns the subject and the seed of a round.

  >>> parse_round("codecs:17")
  ('codecs', 17)
  """
  name, colon, seed = text.partition(":")
  if not colon or not seed.isdecimal():
    raise ValueError(f"must be SUBJECT:SEED, such as codecs:17, got {text!r}.")
  names.check_name(name, SUBJECTS, "SUBJECT")
  return name, int(seed)


def make_rows(tallies: Mapping[str, Tally]) -> list[Row]:
  """Returns rows of the rounds, cases, defects and seconds of each subject."""
  one = Measured
  cases = {
    name: {
      "rounds": one(tally.rounds, "rounds"),
      "cases": one(tally.cases, "cases"),
      "defects": one(len(tally.defects), "defects"),
      "seconds": one(tally.seconds, "s"),
    }
    for name, tally in tallies.items()
  }
  return records.make_rows("fuzz", cases)


def summary_table(rows: Sequence[Row]) -> Table:
  """Returns the counts of each subject."""
  found = tables.index_rows(rows)
  lines = [
    [
      case,
      *(
        f"{found[case, metric].value:,.0f}"
        for metric in ("rounds", "cases", "seconds", "defects")
      ),
    ]
    for case in dict.fromkeys(row.case for row in rows)
  ]
  return Table(
    ("subject", "rounds", "cases", "seconds", "defects"),
    lines,
    title=f"{rows[0].machine}, JAX {rows[0].jax}",
    caption="seconds are summed over processes",
  )
