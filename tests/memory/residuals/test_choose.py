"""What is chosen: minimum cuts, subsets, coders, and rules by names."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxmotion import codecs
from jaxmotion.memory import (
  compress_residuals,
  residuals_of,
  save_and_offload_only_these_names,
  save_only_these_names,
)
from jaxmotion.memory.residuals.choose._max_flow import UNCUTTABLE, FlowGraph
from jaxmotion.memory.residuals.choose._min_cut import values_read_by_backward
from jaxmotion.memory.residuals.choose._subsets import Candidate, find_subsets
from jaxmotion.memory.residuals.trace import trace_joint
from tests.memory.residuals.nets import distance, gradients, normal


def least_cut_by_search(nodes, edges):
  """Returns the least capacity of any cut."""
  best = None
  for sides in itertools.product((0, 1), repeat=nodes - 2):
    side = (0, 1, *sides)
    cost = sum(c for a, b, c in edges if side[a] == 0 and side[b] == 1)
    best = cost if best is None else min(best, cost)
  return best


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_is_cheaper(seed):
  rng = np.random.default_rng(seed)
  nodes = int(rng.integers(3, 9))
  edges = [
    (int(a), int(b), int(rng.integers(1, 9)))
    for a, b in rng.integers(0, nodes, (20, 2))
    if a != b
  ]
  graph = FlowGraph(nodes)
  for edge in edges:
    graph.add_edge(*edge)
  sink_side = graph.find_sink_side()
  assert FlowGraph.SINK in sink_side and FlowGraph.SOURCE not in sink_side
  cost = sum(c for a, b, c in edges if a not in sink_side and b in sink_side)
  assert cost == least_cut_by_search(nodes, edges)


def test_of_equal_cuts_the_one_nearest_to_the_sink_is_taken():
  graph = FlowGraph(4)
  for a, b in ((0, 2), (2, 3), (3, 1)):
    graph.add_edge(a, b, 5)
  assert graph.find_sink_side() == {1}


def test_uncuttable_edges_are_not_cut():
  graph = FlowGraph(3)
  graph.add_edge(0, 2, UNCUTTABLE)
  graph.add_edge(2, 1, 7)
  assert graph.find_sink_side() == {1}


@pytest.mark.parametrize("seed", range(10))
def test_a_search_goes_on_from_the_flow_of_smaller_capacities(seed):
  rng = np.random.default_rng(seed)
  ends = [(int(a), int(b)) for a, b in rng.integers(0, 8, (24, 2)) if a != b]
  graph = FlowGraph(8)
  edges = [graph.add_edge(a, b, int(rng.integers(1, 9))) for a, b in ends]
  room = [graph.capacity[edge] for edge in edges]
  for _ in range(3):
    graph.find_sink_side()
    for i, more in enumerate(rng.integers(0, 5, len(edges)).tolist()):
      graph.capacity[edges[i]] += more
      room[i] += more
    again = FlowGraph(8)
    for (a, b), capacity in zip(ends, room, strict=True):
      again.add_edge(a, b, capacity)
    assert graph.find_sink_side() == again.find_sink_side()


def test_what_a_saved_mask_follows_from_is_not_recomputed():
  def loss(w, x, z):
    same = z[0][None, :] == z[:, 0][:, None]
    return jnp.sum(jnp.sin(x @ w) * same.astype(x.dtype))

  w, x, z = normal(0, 8, 64), normal(1, 64, 8), jnp.round(normal(2, 64, 64))
  saved = residuals_of(loss, w, x, z, memory_budget=0.0)
  names = [r.name for r in saved]
  assert "mask/eq_0" in names and "dense/2" not in names
  found = jax.jit(jax.grad(compress_residuals(loss, memory_budget=0.0)))(
    w, x, z
  )
  assert distance(jax.jit(jax.grad(loss))(w, x, z), found) < 1e-6


def test_a_budget_in_bytes_traces_the_function_once():
  traces = []

  def loss(w, x):
    traces.append(0)
    for _ in range(3):
      x = jnp.sin(x @ w) * x
    return jnp.sum(x)

  w, x = normal(0, 64, 64), normal(1, 128, 64)
  whole = residuals_of(loss, w, x, memory_budget=1.0)
  most = sum(r.nbytes for r in whole) // 2
  traces.clear()
  found = residuals_of(loss, w, x, memory_budget=most)
  assert len(traces) == 1
  assert 0 < sum(r.encoded_bytes for r in found) <= most


OPS = (
  lambda a, b: jnp.sin(a),
  lambda a, b: jnp.exp(b),
  lambda a, b: a * b,
  lambda a, b: a @ b,
)


def random_program(rng, steps=9):
  """Traces a function of two arrays whose steps read random earlier values."""
  picks = [
    (OPS[rng.integers(len(OPS))], *rng.integers(0, i + 2, 2))
    for i in range(steps)
  ]

  def fn(x, y):
    values = [x, y]
    for op, a, b in picks:
      values.append(op(values[a], values[b]))
    return [values[-1] + values[-2]], ()

  like = jax.core.ShapedArray((4, 4), jnp.dtype("float32"))
  return trace_joint(fn, [like, like], [like])


def brute_force(joint, reads, live, candidates, seconds):
  """Bytes and seconds of the sets that none is better than."""
  found = []
  for flags in itertools.product((False, True), repeat=len(candidates)):
    pairs = zip(candidates, flags, strict=True)
    if any(not (flag or c.may_be_missing) for c, flag in pairs):
      continue
    saved = [c for c, flag in zip(candidates, flags, strict=True) if flag]
    known = {*live, *joint.program.constants, *(c.value for c in saved)}
    rerun = joint.order.leading_to(reads, known)
    needed = {*reads, *(v for step in rerun for v in step.reads)}
    if any(v in joint.inputs and v not in known for v in needed):
      continue
    cost = sum(c.seconds for c in saved) + sum(seconds[s] for s in rerun)
    found.append((sum(c.nbytes for c in saved), cost))
  best, front = math.inf, []
  for nbytes, cost in sorted(found):
    if cost < best:
      front.append((nbytes, cost))
      best = cost
  return front


@pytest.mark.parametrize("seed", range(20))
def test_front_of_random_programs_is_that_of_all_subsets(seed):
  rng = np.random.default_rng(seed)
  joint = random_program(rng)
  live = {joint.inputs[0]}
  reads = values_read_by_backward(joint, live)
  steps = joint.order.leading_to(reads, live)
  values = [joint.inputs[1], *(v for s in steps for v in s.outs)]
  some = [v for v in values if rng.random() < 0.7][:10]
  # Whole numbers: sums are exact in any order.
  candidates = [
    Candidate(
      v, int(rng.integers(1, 9)), float(rng.integers(4)), rng.random() < 0.9
    )
    for v in some
  ]
  seconds = {
    s: math.inf if rng.random() < 0.1 else float(rng.integers(1, 9))
    for s in steps
  }
  front = find_subsets(
    joint,
    reads,
    {*live, *joint.program.constants},
    candidates,
    seconds.__getitem__,
  )
  expected = brute_force(joint, reads, live, candidates, seconds)
  assert [(s.nbytes, s.seconds) for s in front] == expected
  for subset in front:
    chosen = [c for c in candidates if c.value in subset.saved]
    assert sum(c.nbytes for c in chosen) == subset.nbytes


TRACES = {"encode": [], "decode": []}


@dataclasses.dataclass(frozen=True)
class Counted(codecs.Codec):
  """Casts to bfloat16 and notes every trace."""

  def encode(self, x, state=(), key=None):
    TRACES["encode"].append(x.shape)
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), "uint16"), ()

  def decode(self, payload, like):
    TRACES["decode"].append(like.shape)
    floats = jax.lax.bitcast_convert_type(payload, jnp.bfloat16)
    return floats.astype(like.dtype)


def test_layers_of_one_shape_share_the_trace_of_a_codec():
  def loss(w, x):
    for _ in range(5):
      x = jnp.sin(x @ w)
    return jnp.sum(x)

  like = jax.ShapeDtypeStruct((64, 64), jnp.float32)
  for traces in TRACES.values():
    traces.clear()
  for _ in range(2):
    jax.jit(jax.grad(compress_residuals(loss, Counted()))).trace(like, like)
  assert len(TRACES["encode"]) == 2  # Once to know the payload's types.
  assert len(TRACES["decode"]) == 1


def looped_loss(ws, x):
  def layer(x, w):
    x = checkpoint_name(jnp.tanh(x @ w), "hidden")
    return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "inner") @ w), None

  return jnp.sum(lax.scan(layer, x, ws)[0] ** 2)


ARGUMENTS = normal(0, 2, 64, 64), normal(1, 64, 64)


@functools.cache
def plain_gradients():
  return gradients(looped_loss, *ARGUMENTS)


@pytest.mark.parametrize(
  ("rules", "hidden_on_host"),
  [
    (save_only_these_names("hidden"), False),
    (
      save_and_offload_only_these_names(
        names_which_can_be_saved=["inner"],
        names_which_can_be_offloaded=["hidden"],
      ),
      True,
    ),
  ],
)
def test_named_residuals_are_saved_and_others_recomputed(rules, hidden_on_host):
  found = residuals_of(looped_loss, *ARGUMENTS, codec=rules)
  on_host = {r.name: r.on_host for r in found}
  assert on_host["dense/scan_0/hidden"] == hidden_on_host
  assert not any("dot_general" in name for name in on_host)
  compressed = compress_residuals(looped_loss, rules)
  assert distance(plain_gradients(), gradients(compressed, *ARGUMENTS)) < 1e-6


def test_a_name_that_no_residual_has_is_refused():
  with pytest.raises(ValueError, match="`codec` must match a residual each"):
    jax.eval_shape(
      compress_residuals(looped_loss, save_only_these_names("hiden")),
      *ARGUMENTS,
    )
