"""Rounds of islands whose processes stop between any two operations.

Nothing runs in a thread here: a seeded schedule runs one cycle of one island at
a time, on a clock of its own, and stops islands in the middle of a cycle.
"""

import concurrent.futures
import functools
import gc
import random

import jax
import jax.numpy as jnp
import numpy as np
import obstore.store
import optax
import pytest

from jaxmotion import codecs, islands
from jaxmotion.islands import _follower, _island, _message, _outer_step, _store
from jaxmotion.islands._store import Object

# Each island changes one place. `identity` and a rate of 1 keep the sums.
PLACES = 40
PARAMS = {"w": jnp.zeros(PLACES)}
GRACE_S = 5.0


class Killed(BaseException):
  """The end of a process."""


class Clock:
  """A clock that a test moves."""

  now = 0.0

  def monotonic(self):
    return self.now


class Executor:
  """Calls at once what another thread would call."""

  def __init__(self, workers):
    pass

  def submit(self, function, *args):
    future = concurrent.futures.Future()
    try:
      future.set_result(function(*args))
    except _store.StoreError as error:
      future.set_exception(error)
    return future


class Store(_store.Store):
  """A store that counts, and whose operations a test makes fail."""

  def __init__(self, store, max_bytes, folder=""):
    super().__init__(store, max_bytes, folder)
    self.plan = []  # What happens to the next operations.
    self.created = []

  def _fail(self, *, is_done):
    if self.plan:
      error, after = self.plan[0]
      if after == is_done:
        self.plan.pop(0)
        if error is not None:
          raise error

  def list(self):
    self._fail(is_done=False)
    listing = super().list()
    self._fail(is_done=True)
    return listing

  def read(self, name):
    self._fail(is_done=False)
    data = super().read(name)
    self._fail(is_done=True)
    return data

  def create(self, name, data):
    self._fail(is_done=False)
    is_first = super().create(name, data)
    self.created += [name] * is_first
    self._fail(is_done=True)
    return is_first

  def write(self, name, data):
    self._fail(is_done=False)
    super().write(name, data)
    self._fail(is_done=True)

  def delete(self, names):
    for name in names:
      self._fail(is_done=False)
      super().delete([name])
      self._fail(is_done=True)


@pytest.fixture
def clock(monkeypatch):
  """A clock for all followers, none of which has a thread."""
  clock = Clock()
  monkeypatch.setattr(_follower, "time", clock)
  monkeypatch.setattr(_island._store, "Store", Store)
  start = lambda follower: follower._renew_lease()
  monkeypatch.setattr(_follower.Follower, "start", start)
  pool = "ThreadPoolExecutor"
  monkeypatch.setattr(_follower.concurrent.futures, pool, Executor)
  return clock


@functools.cache
def compiled_step(codec, max_norm):
  """One outer step for all islands, which each would compile its own."""
  make = functools.partial(_outer_step.make_outer_step, PARAMS)
  return make(optax.sgd(1.0), codec, max_norm)


class Member:
  """An island with its parameters and what it should have changed."""

  def __init__(self, store, place, *, codec=None, max_norm=None, **options):
    codec = codecs.identity() if codec is None else codec
    self.place, self.steps = place, 0
    with pytest.MonkeyPatch.context() as patch:
      step = compiled_step(codec, max_norm)
      patch.setattr(_island, "make_outer_step", lambda *_: step)
      self.island = islands.join(
        store,
        PARAMS,
        optax.sgd(1.0),
        codec=codec,
        every=2,
        delay=1 << 20,  # Never waits.
        name=f"island{place}",
        grace_s=GRACE_S,
        max_norm=max_norm,
        **options,
      )
    self.params = self.island.start()

  @property
  def follower(self):
    return self.island._fragments[0].follower

  @property
  def store(self):
    return self.follower._store

  def train(self, change=1.0):
    w = self.params["w"].at[self.place].add(change)
    self.params, self.steps = self.island.step({"w": w}), self.steps + 1

  def pending(self):
    """Returns what it has changed since the anchor it knows."""
    difference = self.params["w"] - self.island.anchor["w"]
    return float(difference[self.place])


def cycle(*members, count=1):
  for _ in range(count):
    for member in members:
      member.follower._run_cycle()


def checksum(member):
  agreed, _ = member.follower.read_agreed()
  assert agreed.checksum == _message.checksum_arrays(
    (agreed.anchor, agreed.outer_state)
  )
  return agreed.round, agreed.checksum


class Records:
  """What all islands have seen: one anchor in each round."""

  def __init__(self):
    self.checksums, self.sums, self.commits = {}, {}, {}

  def note(self, member):
    round, digest = checksum(member)
    assert self.checksums.setdefault(round, digest) == digest

  def note_commits(self, store):
    """Adds up what commits accepted, each once, before it is deleted."""
    for name in store.list().marks:
      if name.kind == "commit" and name.round not in self.commits:
        data = store.read(name)
        self.commits[name.round] = data
        header = _message.unpack_message(data, "commit").header
        for entry in header["accepted"]:
          island = entry["island"]
          data = store.read(Object("contribution", name.round, island))
          like = compiled_step(codecs.identity(), None).payload_likes
          _, (w,) = _message.unpack_message(
            data, "contribution", jax.tree.leaves(like)
          )
          place = int(island.removeprefix("island"))
          self.sums[place] = self.sums.get(place, 0.0) - float(w[place])
      elif name.kind == "commit":
        assert store.read(name) == self.commits[name.round]


@pytest.mark.parametrize("seed", range(20))
def test_rounds_go_on_whatever_stops_whenever(seed, clock):
  rng = random.Random(seed)
  memory, records = obstore.store.MemoryStore(), Records()
  plain = _store.Store(memory, 1 << 20)
  members = [Member(memory, i) for i in range(3)]
  next_place, kills, errors = 3, 0, 0
  sleeper, wakes = members[0], 0
  for i in range(800):
    clock.now += rng.expovariate(2.0)
    if i >= wakes and rng.random() < 0.01:
      sleeper, wakes = rng.choice(members), i + 250
    awake = [one for one in members if i >= wakes or one is not sleeper]
    member = rng.choice(awake or members)
    fate = rng.random()
    skipped = [(None, False)] * rng.randrange(6)
    if fate < 0.06:
      error = Killed() if fate < 0.03 else _store.StoreError("away")
      member.store.plan = [*skipped, (error, rng.random() < 0.5)]
    try:
      if rng.random() < 0.4:
        member.train()
      cycle(member)
      records.note(member)
    except _store.StoreError:
      errors += 1
    except Killed:
      kills += 1
      members.remove(member)
      if next_place < PLACES:
        members.append(Member(memory, next_place))
        next_place += 1
    member.store.plan = []
    records.note_commits(plain)
  newest = max(checksum(member)[0] for member in members)
  assert kills >= 3 and errors >= 3 and newest >= 30
  # All come to the newest round, with the same bits.
  for _ in range(30):
    clock.now += 1
    cycle(*members)
    records.note_commits(plain)
  assert len({checksum(member) for member in members}) == 1
  assert set(records.commits) == set(range(checksum(members[0])[0]))
  for member in members:
    fragment = member.island._fragments[0]
    # Lands, and sends no more.
    fragment._schedule = fragment._schedule._replace(every=1 << 30)
    member.train()
    assert member.island.round == checksum(member)[0]
    # Whatever an island did was accepted once, or is still its own.
    total = records.sums.get(member.place, 0.0) + member.pending()
    assert total == pytest.approx(member.steps, abs=1e-3)


@pytest.mark.parametrize("operation", range(12))
@pytest.mark.parametrize("after", [False, True])
def test_a_kill_at_each_operation_stops_nobody(operation, after, clock):
  memory = obstore.store.MemoryStore()
  one, other = Member(memory, 0), Member(memory, 1)
  records = Records()
  one.store.plan = [(None, False)] * operation + [(Killed(), after)]
  with pytest.raises(Killed):
    for _ in range(20):
      one.train()
      cycle(one)
      other.train()
      cycle(other)
      records.note(one)
      records.note(other)
  again = Member(memory, 2)
  before = checksum(other)[0]
  for _ in range(30):
    clock.now += 1
    for member in (other, again):
      member.train()
      cycle(member)
      records.note(member)
  assert checksum(other)[0] >= before + 3


def test_a_late_island_goes_on_at_the_newest_anchor(clock):
  memory = obstore.store.MemoryStore()
  one, late = Member(memory, 0), Member(memory, 1)
  late.train()
  for _ in range(100):
    clock.now += 1
    one.train()
    cycle(one, count=3)
  assert checksum(one)[0] > 30
  assert checksum(late)[0] == 0
  # Its round is deleted: it takes the newest snapshot, and keeps its change.
  cycle(late, count=20)
  assert checksum(late) == checksum(one)
  late.train()
  assert late.island.round == checksum(one)[0]
  assert late.pending() == 2.0
  late.train()
  cycle(one, late, count=3)
  assert late.store.created[-1].round >= checksum(one)[0] - 1


def test_objects_do_not_grow_over_1000_rounds(clock):
  memory = obstore.store.MemoryStore()
  one, other = Member(memory, 0), Member(memory, 1)
  counts, alive = [], {}
  while checksum(one)[0] < 1000:
    clock.now += 0.5
    for member in (one, other):
      member.train()
    cycle(one, other)
    counts.append(len(one.store.list().marks))
    one.store.created, other.store.created = [], []
    if checksum(one)[0] % 490 == 0:
      gc.collect()
      alive[checksum(one)[0]] = len(gc.get_objects())
  # 20 rounds of a commit and two contributions, 3 snapshots, 2 leases.
  assert max(counts) <= 20 * 3 + 3 + 2 + 3
  assert abs(alive[980] - alive[490]) < 490, "an object stays for each round"


def test_a_commit_of_a_process_that_slept_is_not_applied(clock, monkeypatch):
  memory = obstore.store.MemoryStore()
  one, sleeper = Member(memory, 0), Member(memory, 1)
  sleeper.train()
  sleeper.train()
  cycle(sleeper)  # Its contribution is there.
  listing = sleeper.store.list()
  for _ in range(100):
    clock.now += 1
    one.train()
    cycle(one, count=3)
  # It wakes up with an old listing, and commits a round that is deleted.
  clock.now += GRACE_S
  sleeper.follower._quorum_s = 0.0
  monkeypatch.setattr(sleeper.follower, "_check", lambda island: False)
  assert sleeper.follower._decide_round(listing)
  assert Object("commit", 0) in one.store.list().marks
  monkeypatch.undo()
  cycle(sleeper, count=20)
  assert checksum(sleeper) == checksum(one)
  sleeper.train()
  # Its change was counted in round 0, which it has never seen decided.
  assert sleeper.pending() == 1.0


def test_islands_whose_bits_drift_take_the_snapshot(clock):
  memory = obstore.store.MemoryStore()
  one, other = Member(memory, 0), Member(memory, 1)
  agreed, _ = other.follower.read_agreed()
  w = np.asarray(agreed.anchor["w"]) + np.float32(1e-7)
  drifted = compiled_step(codecs.identity(), None).agree(0, {"w": w}, agreed[2])
  other.follower._land(drifted)
  one.train()
  one.train()
  clock.now += 1
  for _ in range(3):
    cycle(one)
    clock.now += 1
  other.train()
  other.train()
  with pytest.raises(islands.MessageError, match="commit.00000000 is of an an"):
    for _ in range(10):
      clock.now += 2
      cycle(one)
      cycle(other)
  for _ in range(10):
    one.train()
    clock.now += 2
    cycle(one)
  # A commit that left out another anchor, or ten rounds, make a snapshot.
  for _ in range(60):
    one.train()
    cycle(one)
    clock.now += 2
  cycle(other, one, count=20)
  assert checksum(other) == checksum(one)


@pytest.mark.parametrize("name", [Object("commit", 0), Object("snapshot", 10)])
def test_a_corrupt_object_is_named_and_stops_no_training(name, clock):
  memory = obstore.store.MemoryStore()
  one = Member(memory, 0)
  if name.kind == "snapshot":
    late = Member(memory, 1)
    while Object("snapshot", 20) not in one.store.list().marks:
      clock.now += 1
      one.train()
      cycle(one)
    one.store.delete([Object("snapshot", 20)])
    one = late
  good = one.store.read(name)
  one.store.write(name, b"JMIS" + bytes(200))
  for _ in range(3):
    one.train()
    with pytest.raises(islands.MessageError, match=f"{name.path} is refused"):
      cycle(one, count=10)
  one.store.delete([name])
  if good is not None:
    one.store.create(name, good)
  clock.now += GRACE_S
  before = checksum(one)[0]
  cycle(one, count=10)
  assert checksum(one)[0] > before


def test_an_old_listing_stops_nobody(clock, monkeypatch):
  one = Member(obstore.store.MemoryStore(), 0)
  one.train()
  old = one.store.list()
  one.train()  # Sends.
  sent = one.store.list()
  monkeypatch.setattr(one.store, "list", lambda: old)
  cycle(one, count=3)
  names = [Object("snapshot", 0), Object("contribution", 0, "island0")]
  assert one.store.created == names
  monkeypatch.setattr(one.store, "list", lambda: sent)
  cycle(one, count=2)
  assert checksum(one)[0] == 1


def test_a_change_that_is_too_large_is_refused_and_named(clock, caplog):
  memory = obstore.store.MemoryStore()
  one, bad = (Member(memory, i, max_norm=10.0) for i in range(2))
  one.train()
  one.train()
  bad.train()
  bad.train(1e6)
  cycle(bad, one, count=3)
  assert (
    "contribution.00000000.island1 is refused: its change has" in caplog.text
  )
  assert checksum(one)[0] == 1 and checksum(one) == checksum(bad)
  bad.train()
  assert "the run refused a change" in caplog.text
  assert bad.pending() == 1.0  # What it did after the bad change.


@pytest.mark.parametrize("data", [b"", b"JMIS", bytes(2 << 20)])
def test_a_forged_contribution_is_left_out_and_named(data, clock, caplog):
  memory = obstore.store.MemoryStore()
  one = Member(memory, 0)
  one.store.write(Object("contribution", 0, "forged"), data)
  one.train()
  one.train()
  cycle(one, count=3)
  assert "contribution.00000000.forged is refused" in caplog.text
  assert checksum(one)[0] == 1
  one.train()
  assert one.pending() == 1.0


@pytest.mark.parametrize("name", ["island1", "island0"])
def test_a_change_of_another_island_or_round_is_left_out(name, clock, caplog):
  memory = obstore.store.MemoryStore()
  one = Member(memory, 0)
  one.train()
  one.train()
  data = one.store.read(Object("contribution", 0, "island0"))
  # As that of another island, or of a later round before its island's own.
  forged = Object("contribution", int(name == "island0"), name)
  one.store.create(forged, data)
  cycle(one, count=3)
  one.train()
  one.train()
  cycle(one, count=3)
  assert f"{forged.path} is refused: its" in caplog.text
  # What it sent itself counts once.
  clock.now += GRACE_S
  for _ in range(4):
    one.train()
    cycle(one, count=3)
  w = one.island.anchor["w"]
  assert float(w[0]) + one.pending() == one.steps
  assert not w[1:].any()


@pytest.mark.parametrize("island", ["../evil", "a/b", "", None, 3])
def test_a_commit_that_names_another_path_is_refused(island, clock):
  one = Member(obstore.store.MemoryStore(), 0)
  entry = dict(island=island, sha256="0" * 64)
  header = dict(
    kind="commit",
    round=0,
    anchor=checksum(one)[1],
    accepted=[entry],
    refused=[],
  )
  one.store.create(Object("commit", 0), _message.pack_message(header))
  with pytest.raises(islands.MessageError, match="commit.00000000 is refused"):
    cycle(one)
  assert checksum(one)[0] == 0


def test_a_change_that_is_not_finite_is_not_sent(clock, caplog):
  memory = obstore.store.MemoryStore()
  one = Member(memory, 0)
  one.train()
  one.train(float("nan"))
  assert "not finite" in caplog.text
  np.testing.assert_array_equal(one.params["w"], 0)
  one.train()
  one.train()
  cycle(one, count=3)
  one.train()
  assert one.island.round == 1


def test_error_memory_is_that_of_accepted_changes(clock):
  codec = codecs.feedback(codecs.topk(density=1 / PLACES))
  memory = obstore.store.MemoryStore()
  one = Member(memory, 0, codec=codec)
  one.train()
  one.params["w"] = one.params["w"].at[5].add(0.5)
  one.train()
  states = one.island._fragments[0]._flight.states
  # The round passes without it.
  one.follower._land(
    compiled_step(codec, None).apply(one.follower.read_agreed()[0], [])
  )
  one.train()
  plan = compiled_step(codec, None).plans[0]
  read = lambda state: plan.codec.read_memory(state, plan.like)["error"]
  assert float(read(states[0])[5]) == -0.5
  # It is sent again at once, as a part of the next change.
  assert float(read(one.island._fragments[0]._states[0])[5]) == 0.0
  assert float(read(one.island._fragments[0]._flight.states[0])[5]) == -0.5
  assert one.island._fragments[0]._flight.tokens == 3
