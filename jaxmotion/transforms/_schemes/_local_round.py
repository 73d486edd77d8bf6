"""Rounds of local updates: fragments, when they are sent and when they land."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmotion import core, hosts
from jaxmotion.collectives.extend import update_params
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms import _states
from jaxmotion.transforms._states import LocalState
from jaxmotion.transforms._step._scheme import (
  Scheme,
  StepResults,
  TrainState,
  Workers,
)

Parts = Callable[[str, tuple[int, ...]], int]


class Fragments(NamedTuple):
  """The fragment of every leaf of a tree."""

  treedef: Any
  owners: tuple[int, ...]  # Index of the fragment of each leaf.
  number: int

  def mask(self, tree: PyTree, index: int) -> PyTree:
    """Returns a tree with `optax.MaskedNode` in place of other fragments."""
    # Leaves keep their paths, by which rules choose codecs and masks choose
    # optimizers.
    if self.number == 1:
      return tree
    leaves = self.treedef.flatten_up_to(tree)
    return self.treedef.unflatten(
      [
        x if owner == index else optax.MaskedNode()
        for x, owner in zip(leaves, self.owners, strict=True)
      ]
    )

  def replace(self, tree: PyTree, fragment: PyTree) -> PyTree:
    """Returns the tree with the leaves of a fragment in their places."""
    if self.number == 1:
      return fragment
    is_masked = lambda x: isinstance(x, optax.MaskedNode)
    pairs = zip(
      self.treedef.flatten_up_to(tree),
      jax.tree.leaves(fragment, is_leaf=is_masked),
      strict=True,
    )
    return self.treedef.unflatten([x if is_masked(y) else y for x, y in pairs])


def divide_leaves(
  params: PyTree, count: int, parts: Parts | None = None
) -> Fragments:
  """Divides the leaves of a tree into fragments."""
  # parts: (path, shape) -> index of the fragment.
  named = core.named_leaves(params)
  if not named:
    raise ValueError(
      f"`params` must hold at least one array, got {params!r:.200}."
    )
  if parts is None:
    # The largest leaf goes to fragment 0, the next one to fragment 1, and so on
    # in turns. So fragments are of about equal size, and each has leaves of the
    # first and of the last layers.
    sizes = [jnp.size(leaf) for _, leaf in named]
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    ranks = {leaf: rank for rank, leaf in enumerate(order)}
    owners = [ranks[i] % count for i in range(len(sizes))]
  else:
    owners = []
    for path, leaf in named:
      shape = tuple(jnp.shape(leaf))
      owners.append(parts(path, shape))
      name = f"parts({path!r}, {shape})"
      core.check_int(name, owners[-1], 0, count - 1)
  if empty := sorted(set(range(count)) - set(owners)):
    raise ValueError(
      f"`fragments` must each have a leaf of the parameters, got {count} for "
      f"{len(named)} leaves, and none in {empty}: take fewer, or choose by "
      "`parts`."
    )
  return Fragments(jax.tree.structure(params), tuple(owners), count)


@dataclasses.dataclass(frozen=True)
class LocalRounds(Scheme):
  """Schedule by which workers exchange what they have changed."""

  inner: optax.GradientTransformation  # That of each worker.
  outer: optax.GradientTransformation  # A chain with an exchange.
  every: int  # Steps between two exchanges of a fragment.
  fragments: int
  delay: int  # Steps between sending and landing.
  mix: float  # Share of its own parameters that a worker keeps at a landing.
  parts: Parts | None  # (path, shape) -> fragment.
  skips: bool  # Whether a fragment that is not finite on a worker is not sent.
  # Those of the workers, which `for_workers` fills in.
  axis_name: AxisName = None
  is_weighted: bool = False

  def for_workers(self, workers: Workers) -> Scheme:
    """Returns the scheme with the workers of its schedule."""
    return dataclasses.replace(
      self, axis_name=workers.axis_name, is_weighted=workers.is_weighted
    )

  def divide(self, params: PyTree) -> Fragments:
    """Returns the fragments of parameters."""
    return divide_leaves(params, self.fragments, self.parts)

  def init(self, workers: Workers, params: PyTree) -> LocalState:
    """Makes one worker's state before the first step, inside of a map."""
    assert self.axis_name is not None, "`for_workers` comes first"
    divided = self.divide(params)
    own = core.to_varying(params, self.axis_name)
    inner = core.to_varying(self.inner.init(own), self.axis_name)
    if self.fragments > 1:
      # A rule that no leaf matches is an error in the whole tree only.
      jax.eval_shape(self.outer.init, params)
    outer = tuple(
      self.outer.init(divided.mask(params, k)) for k in range(self.fragments)
    )
    flying: PyTree = ()
    if self.delay:
      landing = jax.tree.map(jnp.copy, params)
      flying = landing, jnp.zeros(self.fragments, bool)
    weights: Any = ()
    if self.is_weighted:
      zeros = jnp.zeros(self.fragments, jnp.float32)
      weights = core.pack_worker(core.to_varying(zeros, self.axis_name))
    return LocalState(
      *_states.make_counts(),
      core.pack_worker(own),
      core.pack_worker(inner),
      outer,
      flying,
      weights,
    )

  def update(
    self, workers: Workers, state: TrainState, grads: Any, results: StepResults
  ) -> tuple[PyTree, LocalState]:
    """Sends and lands what is due after a step, inside of a map."""
    # grads: each worker's own parameters and moments after the step.
    anchor, old = state.params, state.opt_state
    divided = self.divide(anchor)
    count = optax.safe_increment(old.count)
    sending = hosts.check_sending(results.extra_args.get("sending"))
    is_known = sending.phase is not None
    now: Any = sending.phase if is_known else count
    due = self._due_fragment(now, 0)
    turns = list(range(self.fragments))
    if is_known:
      # What lands comes first, as it waits for nothing that this step sends.
      turns = [k for k in self._find_turns(now) if k >= 0]
    else:
      due = sending.order_branch(due)
    # With their leading axis, as XLA copies what passes a branch as a view.
    own, inner_own = (one.value for one in grads)
    ok, skipped = None, old.skipped
    if self.skips:
      is_bad, ok = self._check_due(due, divided, own, sending)
      own, inner_own = self._run_if(
        is_bad, self._begin_anew, (own, inner_own), (anchor,)
      )
    if ok is not None:
      skipped = skipped + ((due >= 0) & ~ok).astype(jnp.int32)
    weights = old.weights
    if results.weight is not None:
      weights = core.unpack_worker(weights) + results.weight
    outer, flying = list(old.outer), old.flying
    # A conditional for each fragment, of what changes with it alone: XLA copies
    # the results of a switch over all fragments, the whole state, at each step.
    for k in turns:
      is_sent = due == k if ok is None else _both(due == k, ok)
      given = dict(results.extra_args)
      if self.is_weighted:
        given["weight"] = weights[k]
        weights = weights.at[k].set(jnp.where(is_sent, 0, weights[k]))
      landing = divided.mask(flying[0] if self.delay else anchor, k)
      fragment = divided.mask(anchor, k), divided.mask(own, k)
      landing, outer[k] = self._send(
        is_sent, (landing, outer[k]), fragment, given, is_known
      )
      is_landing = is_sent
      if self.delay:
        flying = (
          divided.replace(flying[0], landing),
          flying[1].at[k].set(jnp.where(due == k, is_sent, flying[1][k])),
        )
        is_late = self._due_fragment(now, self.delay) == k
        is_landing = _both(is_late, flying[1][k])
      moved = self._run_if(is_landing, self._land, fragment, (landing,))
      anchor = divided.replace(anchor, moved[0])
      own = divided.replace(own, moved[1])
    if self.is_weighted:
      weights = core.pack_worker(weights)
    if is_known and due >= 0:
      # Whoever reads the anchor waits for what is in flight, and may then send.
      waiting, _ = lax.optimization_barrier(
        (divided.mask(anchor, due), divided.mask(flying[0], due))
      )
      anchor = divided.replace(anchor, waiting)
    return anchor, LocalState(
      count,
      skipped,
      core.PerWorker(own),
      core.PerWorker(inner_own),
      tuple(outer),
      flying,
      weights,
    )

  def find_phase(self, count: int) -> int:
    """Returns a step at which the same fragments are due and land."""
    # One of the second round: in the first one some land that were never sent,
    # which changes nothing, and no programs are made for that round alone.
    turns = self._find_turns(count + self.every)
    steps = range(self.every, 2 * self.every)
    return next(n for n in steps if self._find_turns(n) == turns)

  def _begin_anew(
    self, values: tuple[PyTree, PyTree], anchor: PyTree
  ) -> tuple[PyTree, PyTree]:
    """Lets this worker begin at the anchor: its parameters are not finite."""
    # Its moments would make the next parameters non-finite again.
    # Returns new `values`.
    del values
    start = core.to_varying(anchor, self.axis_name)
    inner = core.to_varying(self.inner.init(start), self.axis_name)
    return core.pack_worker(start).value, core.pack_worker(inner).value

  def _find_turns(self, count: int) -> tuple[int, int]:
    """Returns the fragments that land and that are due; -1 for none."""
    return self._due_fragment(count, self.delay), self._due_fragment(count, 0)

  def _due_fragment(self, count: Any, offset: int) -> Any:
    """Returns the fragment that was sent `offset` steps ago; -1 for none."""
    # It is equal on all workers, so that a branch may be around a collective.
    gap = self.every // self.fragments
    since = count - offset
    index = (since // gap - 1) % self.fragments
    is_due = (since > 0) & (since % gap == 0)
    if isinstance(count, int):
      return index if is_due else -1
    return jnp.where(is_due, index, -1)

  def _run_if(
    self,
    predicate: Array | bool,
    run: Callable[..., PyTree],
    values: PyTree,
    others: tuple[PyTree, ...],
  ) -> PyTree:
    """Returns new values, or the old ones if the predicate is False."""
    # `predicate`: bool[], or a bool, which needs no branch.

    def change(values: PyTree, *others: PyTree) -> PyTree:
      """Returns new values, typed as varying where the old ones are."""
      return jax.tree.map(
        lambda new, old: (
          core.to_varying(new, self.axis_name)
          if core.is_varying(old, self.axis_name)
          else new
        ),
        run(values, *others),
        values,
      )

    if isinstance(predicate, bool):
      return change(values, *others) if predicate else values
    return lax.cond(
      predicate, change, lambda values, *_: values, values, *others
    )

  def _send(
    self,
    is_sent: Array | bool,
    values: tuple[PyTree, PyTree],
    fragment: tuple[PyTree, PyTree],
    extra_args: dict[str, Any],
    is_known: bool,
  ) -> PyTree:
    """Exchanges what workers have changed in a fragment, if it is sent."""
    # is_known: whether the host knows the step, which may then end before what
    # it sends has arrived.

    def find_change(anchor: PyTree, own: PyTree) -> PyTree:
      start = core.to_varying(anchor, self.axis_name)
      own = core.unpack_worker(core.PerWorker(own))
      return jax.tree.map(lambda a, p: a - p, start, own)

    exchange = lambda values, anchor, change: update_params(
      self.outer, change, values[1], anchor, extra_args, self.axis_name
    )
    if not is_known:
      return self._run_if(
        is_sent,
        lambda values, a, p: exchange(values, a, find_change(a, p)),
        values,
        fragment,
      )
    change = hosts.mark_computed(find_change(*fragment))
    return self._run_if(is_sent, exchange, values, (fragment[0], change))

  def _land(
    self, values: tuple[PyTree, PyTree], landing: PyTree
  ) -> tuple[PyTree, PyTree]:
    """Moves the anchor, and this worker's own parameters to it."""

    def move_own(p: Array, a: Array) -> Array:
      a = jnp.broadcast_to(a, p.shape)
      moved = a if not self.mix else self.mix * p + (1 - self.mix) * a
      return moved.astype(p.dtype)

    start = core.to_varying(landing, self.axis_name)
    return landing, jax.tree.map(move_own, values[1], start)

  def _check_due(
    self, due: Any, divided: Fragments, own: PyTree, sending: hosts.Sending
  ) -> tuple[Array | bool, Array | None]:
    """Returns whether a due fragment is not finite here, and finite on all."""

    def pass_by(own: PyTree) -> tuple[Array, Array]:
      del own
      return core.to_varying(jnp.bool_(False), self.axis_name), jnp.bool_(True)

    def check(k: int, own: PyTree) -> tuple[Array, Array]:
      leaves = jax.tree.leaves(divided.mask(own, k))
      finite = [jnp.isfinite(x).all() for x in leaves]
      is_bad = core.to_varying(~jnp.stack(finite).all(), self.axis_name)
      # A sum of 4 bytes.
      return is_bad, lax.psum(is_bad.astype(jnp.int32), self.axis_name) == 0

    if sending.phase is None:
      checks = [functools.partial(check, k) for k in range(self.fragments)]
      return lax.switch(due + 1, [pass_by, *checks], own)
    if due < 0:
      return False, None
    is_bad, ok = check(due, own)
    return is_bad, sending.order_branch(ok)


def _both(first: Array | bool, second: Array) -> Array | bool:
  """Returns whether both hold, which needs no array if the first does not."""
  return first is not False and first & second
