"""Compressed all-reduce."""

from typing import NamedTuple

import jax
from jax import lax

from jaxmotion.codecs import Codec, identity
from jaxmotion.codecs.extend import partition
from jaxmotion.collectives._layout import choose_methods, row_like
from jaxmotion.collectives._shared import (
  check_state,
  cut_rows,
  encode_rows,
  init_rows,
  straight_through,
  sum_payloads,
  weigh,
  widen,
)
from jaxmotion.collectives._transport import exchange_rows, gather
from jaxmotion.core import (
  Array,
  AxisName,
  Key,
  PyTree,
  axis_is_bound,
  axis_size,
  check_choice,
  to_varying,
)


class ReduceState(NamedTuple):
  """State of a two-phase exchange of one array.

  Attributes:
    rows: the codec's state for every shard this worker sends.
    mean: the codec's state for the shard of the mean it sends on.
  """

  first: PyTree
  second: PyTree


def all_reduce_init(
  x: PyTree, axis_name: AxisName, codec: Codec, *, method: str | None = None
) -> list[PyTree]:
  """Returns the codec state for `all_reduce`.

  Args:
    x: pytree of arrays or ShapeDtypeStructs of the shapes to be reduced.
    axis_name: the workers' axis.
    codec: the codec of the exchange.
    method: as for `all_reduce`.

  Returns:
    This worker's state, one entry for each array that is encoded.

  Raises:
    ValueError: the codec has state and the axis is not bound here.
  """
  cut = partition(codec, x)
  states = []
  likes = cut.likes()
  fresh = [
    jax.eval_shape(part.codec.init, like)
    for part, like in zip(cut.leaf_groups, likes, strict=True)
  ]
  if not jax.tree.leaves(fresh):
    # Nothing to remember, so nothing depends on the number of workers.
    return [ReduceState((), ()) for _ in likes]
  workers = axis_size(axis_name)
  methods = choose_methods(cut, workers, method)
  for part, like, chosen in zip(cut.leaf_groups, likes, methods, strict=True):
    if chosen != "two_phase":
      states.append(ReduceState(part.codec.init(like), ()))
      continue
    row = row_like(like, workers)
    states.append(
      ReduceState(init_rows(part.codec, workers, row), part.codec.init(row))
    )
  return to_varying(states, axis_name) if axis_is_bound(axis_name) else states


def all_reduce(
  x: PyTree,
  axis_name: AxisName,
  codec: Codec | None = None,
  *,
  state: PyTree | None = None,
  key: Key | None = None,
  op: str = "mean",
  weight: Array | float | None = None,
  method: str | None = None,
) -> tuple[PyTree, PyTree]:
  """Reduces a tree over workers through a codec.

  Call it inside `shard_map` or `pmap`. All payloads travel in one collective
  for each word width (two for the two-phase method). The result has the same
  bits on every worker and is typed as not varying. Its gradient is that of the
  uncompressed collective.

  Args:
    x: pytree of floating-point arrays, this worker's own.
    axis_name: the workers' axis, or a tuple of axes.
    codec: encodes what travels; None is `identity()`, which makes this
      `lax.pmean` (or `psum`) bit for bit.
    state: what `all_reduce_init` or the last call returned.
    key: randomness for codecs that need it; its `worker` word should differ
      between workers and its `shared` word must not.
    op: "mean" or "sum" over workers.
    weight: this worker's weight, a scalar. The mean becomes
      sum(weight x) / sum(weight), the sum becomes sum(weight x). Weights are
      applied before the codec, so before remembered errors are added.
    method: "gather" sends every payload to every worker; "two_phase" sends
      each worker the payloads of its shard, then the encoded mean of the shard
      to all: two encodings, bytes that do not grow with the workers. None
      gathers between 2 workers. Payloads of summable codecs are summed, but
      small ones beside others are gathered between 2 workers; arrays of fewer
      than 64 values a worker are always gathered.

  Returns:
    The reduced tree, of the dtypes of `x` (sums are made in float32), and the
    new state.

  Raises:
    ValueError: an unbound axis, a state of other shapes, an unknown `op`.
    TypeError: a leaf that is not floating-point.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion import codecs
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> def mean(x):
    ...   return all_reduce(x, "data", codecs.uniform(bits=8))[0]
    >>> f = jax.shard_map(
    ...   mean, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P()
    ... )
    >>> jax.jit(f)(jnp.array([0.0, 127.0])).tolist()
    [0.0, 127.0]
  """
  codec = identity() if codec is None else codec
  check_choice("op", op, ("mean", "sum"))
  check_choice("method", method, (None, "gather", "two_phase"))
  workers = axis_size(axis_name)
  cut = partition(codec, x)
  expected = jax.eval_shape(
    lambda: all_reduce_init(x, axis_name, codec, method=method)
  )
  at_rest = jax.eval_shape(lambda s: canonical_state(codec, x, s), expected)
  states = check_state(expected, state, at_rest)
  stopped = to_varying(jax.tree.map(lax.stop_gradient, x), axis_name)
  if weight is not None:
    stopped = weigh(stopped, weight, axis_name, op)
  jobs = [
    _Job(part.codec, widen(part.codec, a), s, k, m)
    for part, a, s, k, m in zip(
      cut.leaf_groups,
      cut.split(stopped),
      states,
      cut.keys(key),
      choose_methods(cut, workers, method),
      strict=True,
    )
  ]
  results = _run(jobs, axis_name, workers, op)
  y = cut.merge(
    [r.astype(a.dtype) for (r, _), a in zip(results, cut.likes(), strict=True)]
  )
  states = [state for _, state in results]
  stock = lax.pmean if op == "mean" else lax.psum

  def plain(x: PyTree) -> PyTree:
    if weight is not None:
      x = weigh(x, weight, axis_name, op)
    return stock(x, axis_name)

  return straight_through(plain, x, y), states


def canonical_state(codec: Codec, x: PyTree, state: PyTree) -> PyTree:
  """Returns the state of `all_reduce` in a form that other codecs share.

  Args:
    codec: the codec of the exchange.
    x: pytree of arrays or shapes that are reduced.
    state: what `all_reduce` or `all_reduce_init` returned.
  """
  parts = partition(codec, x).leaf_groups
  return [
    ReduceState(
      part.codec.canonical_state(s.first)
      if s.second == ()
      else jax.vmap(part.codec.canonical_state)(s.first),
      s.second if s.second == () else part.codec.canonical_state(s.second),
    )
    for part, s in zip(parts, state, strict=True)
  ]


class _Job(NamedTuple):
  """One array to reduce."""

  codec: Codec
  x: Array
  state: ReduceState
  key: Key | None
  method: str


def _run(
  jobs: list[_Job], axis_name: AxisName, workers: int, op: str
) -> list[tuple[Array, PyTree]]:
  """Returns the result and the new state of every job.

  It takes at most one sum, one all-to-all and one gather, whatever the jobs:
  a collective costs round trips however little it moves.
  """
  by_method: dict[str, list[_Job]] = {
    m: [] for m in ("sum", "gather", "two_phase")
  }
  for job in jobs:
    by_method[job.method].append(job)
  phases = _reduce_rows(by_method["two_phase"], axis_name, workers)
  coded = [
    j.codec.encode(j.x, j.state.first, j.key) for j in by_method["gather"]
  ]
  received = gather(
    [payload for payload, _ in coded] + [p.payload for p in phases], axis_name
  )
  gathered, means = received[: len(coded)], received[len(coded) :]
  done = {
    "sum": _sum_all(by_method["sum"], axis_name, workers, op),
    "gather": [
      _settle(job, job.codec.sum_decoded(payloads, job.x), state, workers, op)
      for job, payloads, (_, state) in zip(
        by_method["gather"], gathered, coded, strict=True
      )
    ],
    "two_phase": [
      _join_rows(job, payloads, phase, workers, op)
      for job, payloads, phase in zip(
        by_method["two_phase"], means, phases, strict=True
      )
    ],
  }
  results = {method: iter(of_method) for method, of_method in done.items()}
  return [next(results[job.method]) for job in jobs]


def _sum_all(
  jobs: list[_Job], axis_name: AxisName, workers: int, op: str
) -> list[tuple[Array, PyTree]]:
  coded = [j.codec.encode(j.x, j.state.first, j.key) for j in jobs]
  totals = sum_payloads([p for p, _ in coded], axis_name)
  return [
    _settle(job, job.codec.decode(total, job.x), state, workers, op)
    for job, total, (_, state) in zip(jobs, totals, coded, strict=True)
  ]


def _settle(
  job: _Job, total: Array, state: PyTree, workers: int, op: str
) -> tuple[Array, PyTree]:
  mean = total / workers
  state = ReduceState(job.codec.after_reduce(state, mean), ())
  return (mean if op == "mean" else total), state


class _Phase(NamedTuple):
  """What this worker sends on of the shard it has reduced."""

  payload: PyTree
  first: PyTree
  second: PyTree


def _reduce_rows(
  jobs: list[_Job], axis_name: AxisName, workers: int
) -> list[_Phase]:
  coded = [
    encode_rows(j.codec, cut_rows(j.x, workers), j.state.first, j.key)
    for j in jobs
  ]
  received = exchange_rows([p for p, _ in coded], axis_name)
  phases = []
  for job, payloads, (_, first) in zip(jobs, received, coded, strict=True):
    row = row_like(job.x, workers)
    key = None if job.key is None else job.key.fold(workers)
    payload, second = job.codec.encode_mean(
      payloads, row, job.state.second, key
    )
    own = job.codec.decode(payload, row)
    phases.append(_Phase(payload, first, job.codec.after_reduce(second, own)))
  return phases


def _join_rows(
  job: _Job, payloads: PyTree, phase: _Phase, workers: int, op: str
) -> tuple[Array, PyTree]:
  row = row_like(job.x, workers)
  rows = jax.vmap(lambda p: job.codec.decode(p, row))(payloads)
  first = jax.vmap(job.codec.after_reduce)(phase.first, rows)
  y = rows.reshape(-1)[: job.x.size].reshape(job.x.shape)
  y = y * workers if op == "sum" else y
  return y, ReduceState(first, phase.second)
