"""A thread that follows the rounds of a run in its store.

The follower holds what islands agree on in the newest round that it knows. In
each cycle it renews the island's lease, lists the store, and does what is due::

  commit.R exists       -> read what it lists, make the outer step: round R + 1
  contribution to send  -> create contribution.R.NAME
  all members are there, or a quorum is and the grace is over
                        -> check each contribution, create commit.R
  own commit, and no snapshot for some rounds
                        -> create snapshot.R, delete rounds before the last one
  rounds that are gone, or other bits than those of the commit
                        -> go on from the newest snapshot

Every line of this can be the last one of a process. Contributions and commits
are created once and never changed, so a round is either open or decided for
whoever comes next. A lease is alive if it changed within the grace by this
process's own clock: clocks are never compared.
"""

import atexit
import concurrent.futures
import contextlib
import hashlib
import itertools
import logging
import math
import threading
import time
from typing import Any, NamedTuple

import jax

from jaxmotion.islands import _message, _store
from jaxmotion.islands._message import MessageError
from jaxmotion.islands._outer_step import (
  Agreed,
  Contribution,
  OtherAnchorError,
  OuterStep,
)
from jaxmotion.islands._store import Listing, Object, Store, StoreError

_LOG = logging.getLogger("jaxmotion.islands")
# Least number of rounds between two snapshots, of which the last two are kept.
_SNAPSHOT_ROUNDS = 10
# Most islands whose last accepted contributions are remembered.
_MAX_COUNTED = 1000
# Seconds between two cycles in which nothing happens; the most while a change
# of this island waits for its round; the most after errors.
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.01, 1.0
_MAX_WAITING_S, _MAX_RETRY_S = 0.1, 30.0


class Sent(NamedTuple):
  """A contribution of this island on its way."""

  round: int
  data: bytes
  digest: str  # SHA-256 of the data, by which a commit names it.


class Rules(NamedTuple):
  """Conditions under which a round is committed."""

  quorum: int  # Least number of contributions.
  grace_s: float  # Seconds that a quorum waits for other members.


class Follower:
  """Follows a run and takes part in its decisions, in a thread of its own."""

  def __init__(
    self, store: Store, outer_step: OuterStep, name: str, rules: Rules
  ):
    """Makes a follower; `join_run` and `start` come next."""
    self._store, self._outer_step = store, outer_step
    self.name, self._rules = name, rules
    self._changed = threading.Condition()
    self._thread = threading.Thread(
      target=self._run, name=f"island {name}", daemon=True
    )
    # One for a contribution and one for a snapshot, so that this thread can
    # download meanwhile.
    self._uploaders = concurrent.futures.ThreadPoolExecutor(2)
    self._snapshot: concurrent.futures.Future[None] | None = None
    self._is_stopped = self._is_woken = False
    self._beats, self._beat_s = itertools.count(), -1e9
    # Each lease with its mark, and when it was seen to change.
    self._leases: dict[Object, tuple[Any, float]] = {}
    # The own contribution, and whether it is the one in the store. If a former
    # life of this island has sent another one, then that one counts.
    self._sent: Sent | None = None
    self._upload: concurrent.futures.Future[bool] = concurrent.futures.Future()
    self._refused_digest = ""  # Of the own contribution refused last.
    self._is_stalled = False
    self._failure: BaseException | None = None
    self._agreed: Agreed
    self._lease: Object
    self._begin_round()

  def _begin_round(self) -> None:
    """Forgets what concerns one round alone."""
    # Digest and content of each contribution; None if it is refused.
    self._checked: dict[str, tuple[str, Contribution | None]] = {}
    self._refused: list[dict[str, str]] = []  # As a commit lists them.
    self._has_other_anchors = False
    self._quorum_s: float | None = None  # When a quorum was seen first.
    # A listing may be older than what this island has just written.
    self._is_decided = self._is_committer = False

  def join_run(self, first: Agreed) -> None:
    """Goes to the newest round; the first island of a run begins at `first`."""
    snapshot = Object("snapshot", 0)
    if not self._store.list().rounds("snapshot"):
      self._store.create(snapshot, self._pack_snapshot(first))
    while not self._take_snapshot(self._store.list()):
      pass
    # What is refused later is the thread's to report and to try again.
    with contextlib.suppress(MessageError):
      while self._follow_round(self._store.list()):
        pass
    round = self._agreed.round
    # The round under way does not wait for a newcomer.
    self._lease = Object("lease", round + 1 if round else 0, self.name)

  def start(self) -> None:
    """Writes the lease and starts the thread."""
    self._renew_lease()
    self._thread.start()
    # A thread that XLA runs in while Python ends would crash the process.
    atexit.register(self.stop)

  def stop(self) -> None:
    """Ends the thread and takes the lease back."""
    with self._changed:
      self._is_stopped = True
      self._changed.notify_all()
    if self._thread.ident is not None:
      self._thread.join()
    self._uploaders.shutdown(cancel_futures=True)
    atexit.unregister(self.stop)
    with contextlib.suppress(StoreError):  # It expires.
      self._store.delete([self._lease])

  def send(self, sent: Sent) -> None:
    """Hands a contribution over to the thread."""
    with self._changed:
      self._sent, self._upload = sent, self._start_upload(sent)

  def _start_upload(self, sent: Sent) -> "concurrent.futures.Future[bool]":
    """Begins to write a contribution, while this thread may be reading."""
    name = Object("contribution", sent.round, self.name)
    upload = self._uploaders.submit(self._store.create, name, sent.data)
    upload.add_done_callback(self._wake_up)
    return upload

  def _wake_up(self, _: Any = None) -> None:
    """Ends the pause of the thread."""
    with self._changed:
      self._is_woken = True
      self._changed.notify_all()

  def read_agreed(self) -> tuple[Agreed, str]:
    """Returns the newest round, and the own contribution refused last."""
    with self._changed:
      if self._failure is not None:
        raise RuntimeError(
          "The thread of the island failed."
        ) from self._failure
      return self._agreed, self._refused_digest

  def wait_round(self, round: int, timeout_s: float) -> None:
    """Waits until the run is past a round, unless it is of no use."""
    with self._changed:
      self._changed.wait_for(
        lambda: self._agreed.round > round or self._is_stalled or self._failure,
        timeout_s,
      )

  def _run(self) -> None:
    """Runs cycles until it is stopped."""
    pause_s = retry_s = _MIN_PAUSE_S
    try:
      while not self._is_stopped:
        try:
          is_busy = self._run_cycle()
          self._note_error(None)
          is_waiting = self._find_sent() is not None
          longest_s = _MAX_WAITING_S if is_waiting else _MAX_PAUSE_S
          # Short enough that leases are renewed in time.
          longest_s = min(longest_s, self._rules.grace_s / 10)
          pause_s = 0.0 if is_busy else min(1.5 * pause_s, longest_s)
          retry_s = _MIN_PAUSE_S
        except (StoreError, MessageError) as error:
          self._note_error(error)
          pause_s = retry_s = min(2 * retry_s, _MAX_RETRY_S)
        if self._wait_pause(pause_s) or not pause_s:
          pause_s = _MIN_PAUSE_S
    except BaseException as error:
      with self._changed:
        self._failure = error
        self._changed.notify_all()

  def _wait_pause(self, pause_s: float) -> bool:
    """Waits; returns whether something to send ended the pause."""
    with self._changed:
      self._changed.wait_for(
        lambda: self._is_woken or self._is_stopped, pause_s
      )
      was_woken, self._is_woken = self._is_woken, False
    return was_woken

  def _note_error(self, error: Exception | None) -> None:
    """Says once that the run cannot be followed, and that it is again."""
    if (error is not None) == self._is_stalled:
      return
    if error is None:
      _LOG.warning("%s: follows the run again", self.name)
    else:
      _LOG.warning("%s: trains on by itself: %s", self.name, error)
    with self._changed:
      self._is_stalled = error is not None
      self._changed.notify_all()

  def _run_cycle(self) -> bool:
    """Does what is due; returns whether more may be due at once."""
    self._renew_lease()
    listing = self._store.list()
    self._watch_leases(listing)
    if self._follow_round(listing):
      return True
    sent = self._find_sent()
    if sent and self._upload.done() and (error := self._upload.exception()):
      self._upload = self._start_upload(sent)
      raise error
    return self._decide_round(listing)

  def _find_sent(self) -> Sent | None:
    """Returns the own contribution to this round, if there is one."""
    is_due = self._sent and self._sent.round == self._agreed.round
    return self._sent if is_due else None

  def _renew_lease(self) -> None:
    """Writes the lease again when a fifth of the grace is over."""
    now = time.monotonic()
    if now - self._beat_s >= self._rules.grace_s / 5:
      self._store.write(self._lease, str(next(self._beats)).encode())
      self._beat_s = now

  def _watch_leases(self, listing: Listing) -> None:
    """Notes by this process's clock when each lease was seen to change."""
    now, known = time.monotonic(), self._leases
    self._leases = {
      name: known[name] if known.get(name, ())[:1] == (mark,) else (mark, now)
      for name, mark in listing.marks.items()
      if name.kind == "lease"
    }

  def _find_dead(self) -> set[Object]:
    """Returns the leases that did not change within the grace."""
    since = time.monotonic() - self._rules.grace_s
    return {name for name, (_, seen) in self._leases.items() if seen < since}

  def _follow_round(self, listing: Listing) -> bool:
    """Makes the step of a decided round; returns whether anything moved."""
    name = Object("commit", self._agreed.round)
    snapshots = listing.rounds("snapshot")
    # Rounds before the oldest snapshot are being deleted. A commit of such a
    # round may be that of a process that slept meanwhile.
    if snapshots and snapshots[0] > name.round:
      return self._take_snapshot(listing)
    if name not in listing.marks and not self._is_decided:
      return False
    data = self._store.read(name)
    if data is None:
      return True
    header = self._unpack_commit(name, data)
    if header["anchor"] != self._agreed.checksum:
      if snapshots and snapshots[-1] > name.round:
        return self._take_snapshot(listing)
      raise MessageError(
        f"{name.path} is of an anchor with other bits, as other hardware or "
        "another outer optimizer makes them: waits for the next snapshot"
      )
    contributions = [
      self._fetch(e["island"], e["sha256"]) for e in header["accepted"]
    ]
    accepted = [one for one in contributions if one is not None]
    if len(accepted) < len(contributions):
      return True  # Deleted meanwhile: the next listing has a newer snapshot.
    new = {entry["island"]: entry["sha256"] for entry in header["accepted"]}
    counted = {k: v for k, v in self._agreed.counted.items() if k not in new}
    counted = dict([*counted.items(), *new.items()][-_MAX_COUNTED:])
    agreed = self._outer_step.apply(self._agreed, accepted)
    agreed = agreed._replace(counted=counted)
    refused = {entry["island"]: entry["sha256"] for entry in header["refused"]}
    # The island that committed writes it. If it dies, the next committer does.
    last = _last_snapshot(listing).round
    changes = self._outer_step.snapshot_changes
    interval = max(_SNAPSHOT_ROUNDS, math.ceil(changes / max(1, len(accepted))))
    is_due = self._has_other_anchors or agreed.round - last >= interval
    is_due &= self._is_committer
    self._land(agreed, refused.get(self.name, ""))
    if is_due and (self._snapshot is None or self._snapshot.done()):
      save = self._save_snapshot
      self._snapshot = self._uploaders.submit(save, agreed, listing)
    return True

  def _unpack_commit(self, name: Object, data: bytes) -> dict[str, Any]:
    """Returns the header of a commit, or raises."""
    try:
      header = _message.unpack_message(data, "commit").header
      entries = [*header["accepted"], *header["refused"]]
      texts = [header["anchor"], *(e["sha256"] for e in entries)]
      is_valid = (
        header["round"] == name.round
        and all(type(text) is str for text in texts)
        and all(_store.is_island(e["island"]) for e in entries)
      )
    except (MessageError, KeyError, TypeError) as error:
      raise _refuse(name, error) from None
    if not is_valid:
      raise _refuse(name, "its header is not one of a commit")
    return header

  def _fetch(self, island: str, sha256: str) -> Contribution | None:
    """Returns a contribution that a commit lists; None if it is gone."""
    known, own = self._checked.get(island, ("", None))
    if known == sha256 and own is not None:
      return own
    name, sent = Object("contribution", self._agreed.round, island), self._sent
    if sent is not None and sent.digest == sha256:
      data: bytes | None = sent.data
    else:
      data = self._store.read(name)
    if data is None:
      return None
    if hashlib.sha256(data).hexdigest() != sha256:
      raise _refuse(name, "its SHA-256 is not that of the commit")
    try:
      return self._outer_step.unpack(data, self._agreed, island)
    except MessageError as error:
      raise _refuse(name, error) from None

  def _land(self, agreed: Agreed, refused_digest: str = "") -> None:
    """Makes a round the newest one, and tells other threads."""
    with self._changed:
      self._agreed = agreed
      self._refused_digest = refused_digest or self._refused_digest
      self._changed.notify_all()
    self._begin_round()

  def _decide_round(self, listing: Listing) -> bool:
    """Commits the round if it is due; returns whether it was."""
    round = self._agreed.round
    present = listing.contributors(round)
    if self._find_sent() and self.name in present and not self._upload.done():
      present.remove(self.name)  # It is not read back: the upload will end.
    # They are read as they come, before the round is due.
    accepted = [island for island in present if self._check(island)]
    if len(present) < self._rules.quorum:
      self._quorum_s = None
      return False
    now = time.monotonic()
    self._quorum_s = now if self._quorum_s is None else self._quorum_s
    living = self._leases.keys() - self._find_dead()
    members = {lease.island for lease in living if lease.round <= round}
    is_waiting = now - self._quorum_s < self._rules.grace_s
    if is_waiting and not members <= set(present):
      return False
    # If all are bad the round passes without a step: nobody can send another
    # change in it.
    header = dict(
      kind="commit",
      round=round,
      anchor=self._agreed.checksum,
      accepted=[
        dict(island=island, sha256=self._checked[island][0])
        for island in accepted
      ],
      refused=self._refused,
    )
    data = _message.pack_message(header)
    self._is_committer = self._store.create(Object("commit", round), data)
    self._is_decided = True
    return True

  def _check(self, island: str) -> bool:
    """Returns whether a contribution is a good one; a bad one is named."""
    if island not in self._checked:
      name = Object("contribution", self._agreed.round, island)
      digest, own = "", None
      try:
        sent = self._find_sent() if island == self.name else None
        is_own = sent is not None and self._upload.result()
        data = sent.data if sent and is_own else self._store.read(name)
        if data is None:
          return False
        digest = hashlib.sha256(data).hexdigest()
        change = self._outer_step.unpack(data, self._agreed, island)
        self._outer_step.check_change(change)
        own = change
      except MessageError as error:
        if isinstance(error, OtherAnchorError):
          self._has_other_anchors = True  # It keeps its change.
        else:
          entry = dict(island=island, sha256=digest, reason=str(error))
          self._refused.append(entry)
        _LOG.warning("%s: %s", self.name, _refuse(name, error))
      self._checked[island] = digest, own
    return self._checked[island][1] is not None

  def _pack_snapshot(self, agreed: Agreed) -> bytes:
    """Returns the bytes of a snapshot."""
    header = dict(
      kind="snapshot",
      round=agreed.round,
      codec=self._outer_step.config,
      counted=list(agreed.counted.items()),
    )
    arrays = jax.tree.leaves((agreed.anchor, agreed.outer_state))
    return _message.pack_message(header, arrays)

  def _take_snapshot(self, listing: Listing) -> bool:
    """Goes on from the newest snapshot; returns whether it was still there."""
    name, step = _last_snapshot(listing), self._outer_step
    data = self._store.read(name)
    if data is None:
      return False
    likes, treedef = jax.tree.flatten(step.agreed_likes)
    try:
      header, arrays = _message.unpack_message(data, "snapshot", likes)
      for key, value in (("round", name.round), ("codec", step.config)):
        if header.get(key) != value:
          raise MessageError(f"its {key} is {header.get(key)!r:.300}")
      counted = dict(header["counted"])
    except (MessageError, KeyError, TypeError, ValueError) as error:
      raise _refuse(name, error) from None
    agreed = step.agree(name.round, *jax.tree.unflatten(treedef, arrays))
    self._land(agreed._replace(counted=counted))
    return True

  def _save_snapshot(self, agreed: Agreed, listing: Listing) -> None:
    """Writes a snapshot and deletes old rounds."""
    last = _last_snapshot(listing).round
    # Rounds since the last snapshot stay: an island may be reading them.
    old = [n for n in listing.marks if n.kind != "lease" and n.round < last]
    try:
      name = Object("snapshot", agreed.round)
      self._store.create(name, self._pack_snapshot(agreed))
      # Snapshots first: who finds the oldest one newer than its round takes it.
      self._store.delete([n for n in old if n.kind == "snapshot"])
      self._store.delete([n for n in old if n.kind != "snapshot"])
      self._store.delete(self._find_dead())
    except StoreError as error:
      # The committer of a later round does it.
      _LOG.warning("%s: no snapshot: %s", self.name, error)


def _last_snapshot(listing: Listing) -> Object:
  """Returns the newest snapshot, or raises."""
  snapshots = listing.rounds("snapshot")
  if not snapshots:
    raise MessageError("the run has no snapshot any more")
  return Object("snapshot", snapshots[-1])


def _refuse(name: Object, reason: Any) -> MessageError:
  """Returns an error that names the object which is refused."""
  return MessageError(f"{name.path} is refused: {reason}")
