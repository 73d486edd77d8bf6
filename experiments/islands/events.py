"""Simulates islands that fail and come back, on a clock of its own.

Islands follow the rules of `jaxmotion.islands._follower`: a follower lists,
reads new changes one after the other, then commits if the round is due. A
process that comes back takes the newest snapshot and reads all rounds since.
"""

import collections
import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Setting(NamedTuple):
  """Islands, their failures, and the seconds of what they do."""

  islands: int
  hours: float
  step_s: float  # Seconds of an inner step of the median island.
  payload_s: float  # Seconds that the link needs for an encoded change.
  snapshot_s: float  # Seconds that the link needs for a snapshot.
  checkpoint_s: float  # Seconds that it needs for parameters and Adam's state.
  # Steps of the median island in a round, and that go on after a change was
  # sent. The others take as many as they make in the same time.
  every: int
  delay: int
  snapshot_rounds: int  # Rounds between two snapshots.
  failures: float = 1.0  # Of an island in an hour of its training.
  restart_s: float = 120.0  # Until a process that failed runs again.
  spread: float = 0.1  # Standard deviation of the logarithm of speeds.
  quorum: int = 1
  grace_s: float = 60.0
  poll_s: float = 0.1  # Until a follower that waits lists again.
  seed: int = 0


class Outcome(NamedTuple):
  """Goodput and traffic of a simulated scheme."""

  goodput: float  # Useful steps / steps without failures, waits or transfers.
  upload_payloads: float  # Of an island in an hour, in encoded changes.
  download_payloads: float


def draw_step_seconds(setting: Setting) -> list[float]:
  """Returns the seconds of a step of each island."""
  rng = random.Random(setting.seed)
  return [
    setting.step_s / rng.lognormvariate(0, setting.spread)
    for _ in range(setting.islands)
  ]


def simulate_lockstep(
  setting: Setting,
  chunk_s: float,
  chunk_steps: int,
  exchanges: int,
  reload_s: float,
) -> Outcome:
  """Simulates islands that all wait, and go back, if one fails."""
  # A chunk of steps counts once it is complete, as if checkpoints were free.
  draw = _make_failures(setting)
  failures = [draw() for _ in range(setting.islands)]
  heapq.heapify(failures)
  now, end, chunks = 0.0, 3600 * setting.hours, 0
  while now + chunk_s <= end:
    ready = now + chunk_s
    if failures[0] >= ready:
      chunks += 1
    else:
      ready = failures[0]
      while failures[0] <= ready < end:  # Others may fail while all wait.
        back = failures[0] + setting.restart_s + reload_s
        ready = max(ready, back)
        heapq.heapreplace(failures, back + draw())
    now = ready
  steps = chunks * chunk_steps * setting.islands
  # A ring sends and receives almost two payloads.
  payloads = 2 * exchanges * chunks / setting.hours
  return Outcome(steps / _count_steps(setting), payloads, payloads)


def _count_steps(setting: Setting) -> float:
  """Returns the steps of all islands if nothing keeps them from training."""
  seconds = draw_step_seconds(setting)
  return sum(3600 * setting.hours / step_s for step_s in seconds)


def _make_failures(setting: Setting) -> Callable[[], float]:
  """Returns a function that draws the seconds until a failure."""
  rng, rate = random.Random(setting.seed + 1), setting.failures
  return lambda: 3600 * rng.expovariate(rate) if rate else float("inf")


class _Change:
  """A change of an island, on its way or in the store."""

  def __init__(self, island: "_Island", round: int, steps: float):
    self.island, self.round, self.steps = island, round, steps
    self.index, self.time = -1, 0.0  # Among the changes to its round.
    self.is_accepted = False


class _Island:
  """Trainer and follower of one island."""

  def __init__(self, step_s: float, every: int):
    self.step_s, self.every = step_s, every
    self.life = -1  # Events of a former life of the process are dropped.
    self.begin_life()

  def begin_life(self) -> None:
    """Begins without steps, before training."""
    self.is_training = self.is_blocked = False
    self.steps, self.since = 0.0, 0.0  # Steps until `since`, in seconds.
    self.flight: _Change | None = None
    self.turn = 0  # Events of a former turn of the trainer are dropped.
    self.begin_round(0, 0.0)

  def begin_round(self, round: int, now: float) -> None:
    """Goes to a round, of whose changes none was read."""
    self.round, self.ready_s = round, now
    self.read = 0
    self.is_waiting = self.is_idle = False

  def has_own(self, listed: int) -> bool:
    """Returns whether the first changes of its round have its own one."""
    own = self.flight
    return (
      own is not None and own.round == self.round and (0 <= own.index < listed)
    )

  def settle_steps(self, now: float) -> None:
    """Counts the steps until now."""
    if self.is_training and not self.is_blocked:
      self.steps += (now - self.since) / self.step_s
    self.since = now


class _Run:
  """State of one run of islands."""

  def __init__(self, setting: Setting):
    self.setting = setting
    self._draw_failure = _make_failures(setting)
    period_s = setting.every * setting.step_s
    self._islands = [
      _Island(step_s, max(1, round(period_s / step_s)))
      for step_s in draw_step_seconds(setting)
    ]
    self._events: list[Any] = []
    self._order = itertools.count()
    # Of each round: the changes in the store, and the number of them that its
    # commit lists. Commits list what came first.
    self._changes: collections.defaultdict[int, list[_Change]]
    self._changes = collections.defaultdict(list)
    self._commits: dict[int, int] = {}
    # Living islands, with the first round that waits for each.
    self._leases: dict[_Island, int] = {}
    self._newcomers: set[_Island] = set()  # Whom no round waited for yet.
    self._leader: _Island | None = None  # Who decides the round.
    self._snapshots = [0]  # The last two.
    self._useful = self._uploads = self._downloads = 0.0

  def simulate(self) -> Outcome:
    """Runs all events until the end."""
    for island in self._islands:
      self._begin_process(island, 0.0)
    end = 3600 * self.setting.hours
    while self._events[0][0] < end:
      now, _, island, life, act, *arguments = heapq.heappop(self._events)
      if island.life == life:
        act(island, now, *arguments)
    scale = 1 / (self.setting.islands * self.setting.hours)
    goodput = self._useful / _count_steps(self.setting)
    return Outcome(goodput, self._uploads * scale, self._downloads * scale)

  def _plan(self, time: float, island: _Island, act: Any, *rest: Any) -> None:
    """Plans an act of this life of an island."""
    event = time, next(self._order), island, island.life, act, *rest
    heapq.heappush(self._events, event)

  # The process.

  def _begin_process(self, island: _Island, now: float) -> None:
    """Begins a life with the newest snapshot."""
    island.life += 1
    self._plan(now + self._draw_failure(), island, self._fail)
    island.begin_life()
    if self._commits:
      self._take_snapshot(island, now)
    else:
      self._run_cycle(island, now)

  def _take_snapshot(self, island: _Island, now: float) -> None:
    """Goes on from the newest snapshot."""
    ready_s = now + self.setting.snapshot_s
    island.begin_round(self._snapshots[-1], ready_s)
    self._downloads += self.setting.snapshot_s / self.setting.payload_s
    self._plan(ready_s, island, self._run_cycle)

  def _start_training(self, island: _Island, now: float) -> None:
    """Begins to train, once the newest round is known."""
    island.is_training, island.since = True, now
    # The round under way does not wait for a newcomer.
    self._leases[island] = island.round + 1 if island.round else 0
    if island.round:
      self._newcomers.add(island)
    self._plan_send(island, now)

  def _fail(self, island: _Island, now: float) -> None:
    """Ends a life; its lease lives on for the grace."""
    island.life += 1
    island.begin_life()
    self._plan(now + self.setting.grace_s, island, self._expire_lease)
    self._plan(now + self.setting.restart_s, island, self._begin_process)
    if self._leader is island:
      self._replace_leader(now)

  def _expire_lease(self, island: _Island, now: float) -> None:
    """Takes the lease of a dead process away."""
    self._leases.pop(island, None)
    self._newcomers.discard(island)
    self._wake_leader(now)

  # The trainer.

  def _plan_send(self, island: _Island, now: float) -> None:
    """Plans when a change is sent: after `every` steps."""
    island.turn += 1
    left = max(0.0, island.every - island.steps)
    self._plan(now + left * island.step_s, island, self._send, island.turn)

  def _send(self, island: _Island, now: float, turn: int) -> None:
    """Sends a change, and trains on for `delay` steps."""
    if turn != island.turn:
      return
    setting = self.setting
    island.settle_steps(now)
    island.flight = _Change(island, island.round, island.steps)
    island.steps = 0.0
    self._uploads += 1
    self._plan(now + setting.payload_s, island, self._arrive, island.flight)
    block = now + setting.delay * setting.step_s
    deadline = now + 2 * setting.grace_s
    if block < deadline:
      self._plan(block, island, self._block, turn, True)
      self._plan(deadline, island, self._block, turn, False)

  def _block(
    self, island: _Island, now: float, turn: int, is_blocked: bool
  ) -> None:
    """Lets the trainer wait for its round, or go on."""
    if turn == island.turn:
      island.settle_steps(now)
      island.is_blocked = is_blocked

  def _land(self, island: _Island, now: float) -> None:
    """Moves parameters to a newer anchor."""
    if not island.is_training:
      return
    island.settle_steps(now)
    if island.flight and not island.flight.is_accepted:
      island.steps += island.flight.steps  # A part of the next change.
    island.flight, island.is_blocked = None, False
    self._plan_send(island, now)

  # The store.

  def _arrive(self, island: _Island, now: float, change: _Change) -> None:
    """Puts a change into the store, unless the island has one there."""
    changes = self._changes[change.round]
    # One of a former life of the island counts.
    if not any(one.island is island for one in changes):
      change.index, change.time = len(changes), now
      changes.append(change)
      self._wake_leader(now)

  # The follower.

  def _run_cycle(self, island: _Island, now: float) -> None:
    """Follows decided rounds, then waits or leads."""
    if island.round < self._snapshots[0]:  # Its changes are deleted.
      self._land(island, now)
      self._take_snapshot(island, now)
    elif island.round in self._commits:
      self._plan_follow(island, now)
    else:
      if not island.is_training:
        self._start_training(island, now)
      island.is_waiting = True
      if self._leader is None:
        self._lead(island, now)

  def _plan_follow(self, island: _Island, now: float) -> None:
    """Plans when an island has read what the commit of its round lists."""
    listed = self._commits[island.round]
    *_, end = self._list_reads(island, listed)
    self._downloads += listed - island.has_own(listed)
    self._plan(max(now, end), island, self._follow)

  def _list_reads(self, island: _Island, listed: int) -> Iterator[float]:
    """Yields when an island has read none, one, two ... of the changes."""
    yield (end := island.ready_s)
    for change in self._changes[island.round][:listed]:
      if change is not island.flight:  # It does not read its own change.
        end = max(end, change.time) + self.setting.payload_s
      yield end

  def _follow(self, island: _Island, now: float) -> None:
    """Makes the step of a decided round."""
    island.begin_round(island.round + 1, now)
    self._land(island, now)
    self._run_cycle(island, now)

  def _lead(self, island: _Island, now: float) -> None:
    """Lists the store and reads what is new, before others decide."""
    # Only the island that is first in a round runs each cycle.
    self._leader, island.is_idle = island, False
    listed = len(self._changes[island.round])
    new = listed - island.read
    read = new - (island.has_own(listed) - island.has_own(island.read))
    island.read = listed
    time = now + read * self.setting.payload_s
    self._plan(time, island, self._decide, listed, bool(new))

  def _decide(
    self, island: _Island, now: float, listed: int, has_read: bool
  ) -> None:
    """Commits the round if it is due, or waits."""
    setting = self.setting
    has_quorum = listed >= setting.quorum
    grace_end = setting.grace_s
    if has_quorum:
      quorum = self._changes[island.round][setting.quorum - 1]
      grace_end += max(quorum.time, island.ready_s)
    if has_quorum and (now >= grace_end or self._has_members(island, listed)):
      self._commit(island, now, listed)
    elif has_read:
      self._lead(island, now)
    else:
      island.is_idle = True
      if has_quorum:
        self._plan(grace_end, island, self._end_grace, island.round)

  def _has_members(self, island: _Island, listed: int) -> bool:
    """Returns whether all members have sent a change."""
    if listed < len(self._leases) - len(self._newcomers):
      return False
    present = {one.island for one in self._changes[island.round][:listed]}
    return self._leases.keys() - self._newcomers <= present

  def _end_grace(self, island: _Island, now: float, round: int) -> None:
    """Wakes a follower whose grace is over."""
    if island.is_idle and island.round == round:
      self._lead(island, now)

  def _wake_leader(self, now: float) -> None:
    """Lets the leader list once more, if it waits."""
    if self._leader is not None and self._leader.is_idle:
      self._leader.is_idle = False
      time = now + self.setting.poll_s
      self._plan(time, self._leader, self._lead)

  def _replace_leader(self, now: float) -> None:
    """Lets the next island lead, with what it has read."""
    self._leader = None
    waiting = [one for one in self._islands if one.is_waiting]
    if waiting:
      island = min(waiting, key=lambda one: one.ready_s)
      listed = len(self._changes[island.round])
      ends = list(self._list_reads(island, listed))
      island.read = sum(end <= now for end in ends[1:])
      self._lead(island, now)

  def _commit(self, island: _Island, now: float, listed: int) -> None:
    """Decides a round; followers see it when they list again."""
    round = island.round
    self._commits[round], self._leader = listed, None
    for change in self._changes[round][:listed]:
      change.is_accepted = True
      self._useful += change.steps
    self._newcomers = {
      one for one in self._newcomers if self._leases[one] > round + 1
    }
    if round + 1 - self._snapshots[-1] >= self.setting.snapshot_rounds:
      time = now + self.setting.snapshot_s
      self._plan(time, island, self._save_snapshot, round + 1)
    for one in self._islands:
      if one.is_waiting:
        one.is_waiting = False
        self._plan_follow(one, now + self.setting.poll_s)

  def _save_snapshot(self, island: _Island, now: float, round: int) -> None:
    """Writes a snapshot, unless another was written meanwhile."""
    if round - self._snapshots[-1] >= self.setting.snapshot_rounds:
      self._snapshots = [self._snapshots[-1], round]
      self._uploads += self.setting.snapshot_s / self.setting.payload_s


def simulate_islands(setting: Setting) -> Outcome:
  """Simulates islands that go on while others fail."""
  return _Run(setting).simulate()
