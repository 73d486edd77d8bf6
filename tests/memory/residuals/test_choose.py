"""What is chosen: minimum cuts, subsets, coders, and rules by names."""

import dataclasses
import itertools

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
from jaxmotion.memory.residuals.choose._max_flow import FlowGraph
from tests.memory.residuals.nets import distance, gradients, normal


def least_cut_by_search(nodes, edges):
  """Returns the least capacity of any cut."""
  cuts = [(0, 1, *s) for s in itertools.product((0, 1), repeat=nodes - 2)]
  return min(sum(c for a, b, c in edges if side[a] < side[b]) for side in cuts)


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_is_cheaper_and_of_equal_ones_that_nearest_to_the_sink(seed):
  chain = FlowGraph(4)
  for a, b in ((0, 2), (2, 3), (3, 1)):
    chain.add_edge(a, b, 5)
  assert chain.find_sink_side() == {1}
  rng = np.random.default_rng(seed)
  nodes = int(rng.integers(3, 9))
  ends = rng.integers(0, nodes, (20, 2)).tolist()
  edges = [[a, b, int(rng.integers(1, 9))] for a, b in ends if a != b]
  graph = FlowGraph(nodes)
  added = [graph.add_edge(*edge) for edge in edges]
  for _ in range(3):
    sink_side = graph.find_sink_side()
    assert FlowGraph.SINK in sink_side and FlowGraph.SOURCE not in sink_side
    cost = sum(c for a, b, c in edges if a not in sink_side and b in sink_side)
    assert cost == least_cut_by_search(nodes, edges)
    # The next search goes on from the flow of smaller capacities.
    for i, more in enumerate(rng.integers(0, 5, len(edges)).tolist()):
      graph.capacity[added[i]] += more
      edges[i][2] += more


def test_what_a_saved_mask_follows_from_is_not_recomputed():
  def loss(w, x, z):
    same = z[0][None, :] == z[:, 0][:, None]
    return jnp.sum(jnp.sin(x @ w) * same.astype(x.dtype))

  w, x, z = normal(0, 8, 64), normal(1, 64, 8), jnp.round(normal(2, 64, 64))
  saved = residuals_of(loss, w, x, z, memory_budget=0.0)
  names = [r.name for r in saved]
  assert "mask/eq_0" in names and "dense/2" not in names
  ours = compress_residuals(loss, memory_budget=0.0)
  found = jax.jit(jax.grad(ours))(w, x, z)
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
  expected, found = (
    gradients(fn, *ARGUMENTS)
    for fn in (looped_loss, compress_residuals(looped_loss, rules))
  )
  assert distance(expected, found) < 1e-6
