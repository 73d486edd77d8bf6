"""Calls of a trainer: `join`, and `step` after each inner step."""

import uuid
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmotion import codecs, core
from jaxmotion.core import PyTree
from jaxmotion.islands import _store
from jaxmotion.islands._follower import Follower, Rules
from jaxmotion.islands._fragment import Fragment, Schedule, gather
from jaxmotion.islands._job import JobFollower
from jaxmotion.islands._outer_step import make_outer_step
from jaxmotion.transforms.extend import Fragments, divide_leaves


class Island:
  """One of the islands that train a model together; `join` makes it.

  Attributes:
    name: name of the island.

  Example:
    >>> import tempfile, optax
    >>> from jaxmotion import codecs, islands
    >>> params = {"w": jnp.zeros(2)}
    >>> outer, codec = optax.sgd(1.0), codecs.identity()
    >>> folder = tempfile.mkdtemp()
    >>> island = islands.join(folder, params, outer, codec=codec, every=1)
    >>> params = island.start()
    >>> params = island.step({"w": params["w"] + 1})
    >>> params["w"].tolist(), island.round
    ([1.0, 1.0], 1)
    >>> island.stop()
  """

  def __init__(
    self, params: PyTree, divided: Fragments, fragments: list[Fragment]
  ):
    """Makes an island whose followers have joined the run."""
    self.name = fragments[0].follower.name
    self._params_like = jax.tree.map(core.shape_dtype, params)
    self._divided, self._fragments = divided, fragments
    self._is_started = False

  @property
  def round(self) -> int:
    """Number of rounds that all of this island's parameters have seen."""
    return min(fragment.landed.round for fragment in self._fragments)

  @property
  def anchor(self) -> PyTree:
    """The parameters on which the islands agreed last: evaluate and save them.

    Each fragment has the same bits on all islands in the same round.
    """
    whole = self._params_like
    for fragment in self._fragments:
      whole = self._divided.replace(whole, fragment.landed.anchor)
    return jax.tree.map(jnp.copy, whole)

  def start(self) -> PyTree:
    """Begins to take part; returns the parameters to start with.

    They are the anchor of the newest round. Every island starts with those of
    the first one, whatever it gave to `join`.
    """
    if not self._is_started:
      for fragment in self._fragments:
        fragment.follower.start()
      self._is_started = True
    return self.anchor

  @core.declare(
    params=core.typed_arrays,
    tokens=core.measured(core.number(0, 2**31, open_low=True)),
  )
  def step(self, params: PyTree, tokens: float = 1) -> PyTree:
    """Takes part in the run; call it after each step of the inner optimizer.

    Most calls return what they are given. After `every` calls the change since
    the anchor is sent. Once a round is decided, a call moves the parameters: to
    the new anchor, plus what they have changed and not yet sent.

    Args:
      params: this island's parameters, of the shapes that `join` was given.
        They may be sharded over devices, also of the other processes of a job.
      tokens: weight of this step in the mean over islands, more than 0.

    Returns:
      The parameters to go on with, placed like `params`.

    Raises:
      TypeError: a leaf is no array.
      ValueError: `params` have other shapes than those of the run.
      RuntimeError: `start` was not called, or the island's thread failed.
    """
    if not self._is_started:
      raise RuntimeError(
        "`step` must come between `start`, whose parameters training begins "
        "with, and `stop`."
      )
    if not core.same_shapes(params, self._params_like):
      raise ValueError(
        "`params` must be like those that `start` returned, got "
        f"{core.shape_strings(params)}."
      )
    moved, is_finite = params, True
    for fragment, part in self._parts(params):
      new = fragment.step(part, tokens)
      is_finite &= new is not None
      if new is not None:
        moved = self._divided.replace(moved, new)
    if not is_finite:
      # The next step would carry what is not finite to the other fragments.
      for fragment, part in self._parts(params):
        moved = self._divided.replace(moved, fragment.drop_change(part))
    return moved

  def _parts(self, params: PyTree) -> Iterator[tuple[Fragment, PyTree]]:
    """Iterates over the fragments and their parameters."""
    for k, fragment in enumerate(self._fragments):
      yield fragment, self._divided.mask(params, k)

  def stop(self) -> None:
    """Leaves the run; a change that was not sent yet is lost."""
    self._is_started = False
    for fragment in self._fragments:
      fragment.follower.stop()


def _check_params(name: str, value: Any) -> Any:
  """Returns a tree of concrete floating-point arrays, or raises."""
  if not jax.tree.leaves(value):
    raise ValueError(f"`{name}` must hold an array, got {value!r:.80}.")
  for path, leaf in core.named_leaves(value):
    core.float_array(f"{name}/{path}", leaf)
    if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
      raise TypeError(
        f"`{name}` must be arrays with values, got {leaf!r:.80}: call `join` "
        "outside of jitted functions."
      )
  return value


@core.declare(
  params=_check_params,
  outer=core.instance(optax.GradientTransformation, "an optax transformation"),
  every=core.integer(1, 2**31 - 1),
  fragments=core.integer(1, 2**31 - 1),
  delay=core.integer(0, 2**31 - 1),
  name=core.optional(_store.check_island),
  quorum=core.integer(1, 2**31 - 1),
  grace_s=core.measured(core.number(0, 1e9, open_low=True)),
  max_norm=core.optional(core.measured(core.number(0, open_low=True))),
)
def join(
  store: Any,
  params: PyTree,
  outer: optax.GradientTransformation,
  *,
  codec: codecs.Codec,
  every: int,
  fragments: int = 1,
  delay: int = 0,
  name: str | None = None,
  quorum: int = 1,
  grace_s: float = 60.0,
  max_norm: float | None = None,
) -> Island:
  r"""Joins a run of islands, which train one model through an object store.

  An island is a process that trains by itself (local SGD, DiLoCo), or a JAX job
  of several. Now and then it puts its change since the anchor into the store,
  encoded by a codec. When all islands have, or the grace is over, one of them
  commits the round. All then take the mean of the changes that it lists,

  .. math:: d = \sum_r t_r \; decode(encode(a - p_r)) / \sum_r t_r

  as the gradient of `outer`, which moves the anchor a. Islands come and go, and
  none is special. Who is late, or joins later, goes on at the newest anchor and
  keeps what it has changed and not yet sent. If the store cannot be reached, an
  island trains on by itself.

  Of a JAX job of several processes, all call `join`, `start`, `step` and `stop`
  together. The first one talks to the store, and sends what it reads to the
  others. Each holds the whole model on one device to encode. A job looks for a
  new round only in steps that send a change or may wait.

  An island holds its parameters, the anchor, the outer state, and a copy of the
  parameters while a change is sent. It reads the changes of all others, one
  after the other. The mean is compiled once for each number of changes.

  With equal tokens, nobody missing and no delay, the result has the bits of
  `local_updates` with `exchange(..., method="gather")`. Tests check it on CPU
  for `uniform` and `topk`, with feedback. With `sign`, last bits differ, since
  XLA compiles other programs for it. Unequal tokens weigh changes after they
  are decoded.

  Args:
    store: folder of the run, its URL (`s3://`, `gs://`, `az://`), or a store of
      obstore. Every run needs its own, and all islands the same one.
    params: pytree of floating-point arrays. Those of the first island begin the
      run; of others the shapes are read. They are no more needed after the
      call.
    outer: optimizer of the anchor, such as `optax.sgd(0.7, momentum=0.9,
      nesterov=True)`, the same on all islands, without an exchange.
    codec: codec of the changes, the same on all islands. Its error memory is
      this island's own, and keeps nothing of a change that was not accepted.
    every: number of steps between two changes of the same parameters that are
      sent. It may differ between islands.
    fragments: number of parts of the parameters, a divisor of `every`. Each has
      rounds of its own. A part is sent every `every / fragments` steps, in
      turns, so that the link is used evenly (streaming DiLoCo). The store gets
      as many times more requests. All islands need the same number.
    delay: number of steps that go on after a change was sent before `step`
      waits for the round. With 0 it waits at once.
    name: name of the island, 1 to 64 letters, digits, `_` or `-`. None makes
      one. Two living islands must not have the same.
    quorum: least number of contributions to a round.
    grace_s: seconds that a round with a quorum waits for other islands. An
      island that gave no sign for as long is not waited for. `step` waits for
      twice as long at most, then trains on.
    max_norm: largest L2 norm of a change of a fragment that is accepted; None
      has no limit.

  Returns:
    The island. `params = island.start()` has the parameters to begin with, and
    `params = island.step(params)` comes after each step of the trainer.

  Raises:
    ImportError: obstore is missing: `pip install 'jaxmotion[islands]'`.
    TypeError: an argument of another type, such as a `codec` of none.
    ValueError: a `name` with other characters; a codec with rounds of its own,
      or whose memory needs the mean; a run of another model, codec or number of
      fragments; `fragments` that no leaf fills or that do not divide `every`.
    StoreError: the store cannot be reached.

  Example:
    >>> import tempfile, optax
    >>> from jaxmotion import codecs
    >>> params = {"w": jnp.zeros(4)}
    >>> outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    >>> folder, codec = tempfile.mkdtemp(), codecs.uniform(bits=8)
    >>> island = join(folder, params, outer, codec=codec, every=2)
    >>> params = island.start()
    >>> for _ in range(4):
    ...   params = jax.tree.map(lambda p: p + 0.1, params)  # Your step.
    ...   params = island.step(params)
    >>> island.round
    2
    >>> island.stop()

  References:
    Douillard et al., *DiLoCo*, arXiv 2311.08105, 2023; Douillard et al.,
    *Streaming DiLoCo with overlapping communication*, arXiv 2501.18512, 2025.
  """
  if every % fragments:
    raise ValueError(
      f"`fragments` must divide `every`, {every}, got {fragments}."
    )
  if fragments > 1:
    # A rule that no leaf matches is an error in the whole tree only.
    make_outer_step(params, outer, codec, max_norm)
  divided = divide_leaves(params, fragments)
  schedule = Schedule(every, delay, grace_s)
  name = name or uuid.uuid4().hex[:12]

  def join_fragment(k: int) -> Fragment:
    part = divided.mask(params, k)
    own = f"{k} of {fragments}" if fragments > 1 else None
    outer_step = make_outer_step(part, outer, codec, max_norm, own)
    # On the host, so that the run is not bound to the trainer's devices.
    anchor = jax.tree.map(np.asarray, gather(part))
    follower: Any = None
    if jax.process_index() == 0:
      # Beside the arrays, there is a header.
      likes = outer_step.agreed_likes, outer_step.payload_likes
      folder = f"fragment.{k}" if k else ""
      opened = _store.Store(store, core.tree_bytes(likes) + (1 << 20), folder)
      follower = Follower(opened, outer_step, name, Rules(quorum, grace_s))
      follower.join_run(outer_step.agree(0, anchor, outer.init(anchor)))
    if jax.process_count() > 1:
      follower = JobFollower(follower, outer_step)
    # In turns, as `local_updates` sends them.
    first = (k + 1) * (every // fragments)
    return Fragment(outer_step, follower, schedule, first)

  return Island(params, divided, [join_fragment(k) for k in range(fragments)])
