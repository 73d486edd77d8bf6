"""States of codecs that the library does not know, on other workers.

The codecs of this file remember something, and no room of the library names
them: whatever asks what they remember asks their own methods.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxmotion
from jaxmotion import checkpoint, codecs, core, transforms
from jaxmotion.codecs import MemoryPart
from tests.checkpoint.helpers import (
  fill_randomly,
  make_mesh,
  mesh_of,
  resize_all,
  saved_like,
)

PARAMS = {
  "w": np.zeros((24, 24), np.float32),  # Two phases on 3 workers or more.
  "b": np.zeros(5, np.float32),
  "e": np.zeros((0, 3), np.float32),
}
COUNTS = (4, 2, 8, 3)


@dataclasses.dataclass(frozen=True)
class halves(codecs.Codec):
  """Sends half of what it has, and the rest later: in a state of its own."""

  memory_parts = (MemoryPart("error", is_pending=True),)

  def init(self, like):
    # Flat and in twos, so that only the codec knows what it stands for.
    return {"twice": jnp.zeros(int(np.prod(like.shape)), jnp.float32)}

  def encode(self, x, state=(), key=None):
    value = x.astype(jnp.float32) + state["twice"].reshape(x.shape) / 2
    words = jax.lax.bitcast_convert_type(value / 2, jnp.uint32)
    return words, {"twice": value.reshape(-1)}

  def decode(self, payload, like):
    values = jax.lax.bitcast_convert_type(payload, jnp.float32)
    return values.astype(like.dtype)

  def read_memory(self, state, like):
    return {"error": (state["twice"] / 2).reshape(like.shape)}

  def write_memory(self, parts, means, like, workers):
    return {"twice": 2 * parts["error"].reshape(-1)}


@dataclasses.dataclass(frozen=True)
class drift(codecs.MultiRoundCodec):
  """Sends differences to the mean so far, which all workers share."""

  round_kinds = ("sum",)
  memory_parts = (
    MemoryPart("offset", keeps_mean=True, noun="an offset"),
    MemoryPart("error_of_mean", is_pending=True, row_of="offset"),
  )

  def init_rounds(self, like, workers):
    size = int(np.prod(like.shape))
    zeros = jnp.zeros(like.shape, jnp.float32)
    return (zeros, jnp.zeros(-(-size // workers)), core.Shared(zeros))

  def init(self, like):
    return self.init_rounds(like, 1)

  def reduce_in_rounds(self, x, state, key, workers):
    own, row, mean = state
    total = yield codecs.Message("sum", x - own)
    mean = mean.value + total / workers
    return codecs.Reduced(mean, x - own, (x, row, core.Shared(mean)))

  def decode(self, payload, like):
    return payload

  def read_memory(self, state, like):
    return {"offset": state[0], "error_of_mean": state[1]}

  def write_memory(self, parts, means, like, workers):
    fresh = self.init_rounds(like, workers)
    return (parts["offset"], fresh[1], core.Shared(means["offset"]))


def fill(tx):
  """A state of as many workers as `COUNTS` begins with."""
  return fill_randomly(saved_like(tx, PARAMS, COUNTS[0])[1])


def read_outstanding(tx, state, workers):
  """What the only worker has still to send, once all were joined to one."""
  _, one = resize_all(tx, state, PARAMS, (workers, 1))
  return [
    np.asarray(reduced.first["twice"][0]) / 2
    for reduced in one.codec_state.value
  ]


@pytest.mark.parametrize("options", [{}, {"method": "gather"}])
def test_what_is_still_to_be_sent_is_kept(options):
  tx = transforms.exchange("data", halves(), **options)
  states = resize_all(tx, fill(tx), PARAMS, COUNTS)
  means = [
    read_outstanding(tx, state, n)
    for state, n in zip(states, COUNTS, strict=True)
  ]
  assert np.abs(means[0][-1]).max() > 0.1
  for found in means[1:]:
    for a, b in zip(means[0], found, strict=True):
      np.testing.assert_allclose(b, a, rtol=0, atol=4e-6)


def test_workers_that_train_and_change_send_all():
  params = {"w": np.zeros((24, 24), np.float32)}
  tx = transforms.exchange("data", halves())
  rng = np.random.default_rng(0)
  left, sent, state, layout = 0.0, 0.0, None, None
  for workers in (*COUNTS, 1):
    mesh = make_mesh(workers)
    if state is None:
      state = transforms.init_state(tx, params, mesh)
    else:
      state = checkpoint.resize(tx, state, params, layout, mesh)
    layout = checkpoint.describe_state(tx, params, mesh)
    specs = jaxmotion.state_specs(state, "data")
    grads = rng.normal(size=(workers, 24, 24)).astype(np.float32)
    update, state = jax.jit(
      jax.shard_map(
        lambda g, s: tx.update({"w": g[0]}, s),
        mesh=mesh,
        in_specs=(P("data"), specs),
        out_specs=(P(), specs),
      )
    )(grads, state)
    left = left + grads.astype(np.float64).mean(0)
    sent = sent + np.asarray(update["w"], np.float64)
  rest = np.asarray(state.codec_state.value[0].first["twice"][0]) / 2
  assert np.abs(rest).max() > 0.1
  np.testing.assert_allclose(sent.ravel() + rest, left.ravel(), atol=4e-6)


def test_it_goes_on_as_feedback_and_back():
  own = transforms.exchange("data", halves())
  signs = transforms.exchange("data", codecs.feedback(codecs.sign()))
  layout, like = saved_like(own, PARAMS, 4)
  state = fill_randomly(like)
  there = checkpoint.resize(signs, state, PARAMS, layout, mesh_of(3))
  layout = saved_like(signs, PARAMS, 3)[0]
  back = checkpoint.resize(own, there, PARAMS, layout, mesh_of(4))
  expected = read_outstanding(own, state, 4)
  for a, b in zip(expected, read_outstanding(own, back, 4), strict=True):
    np.testing.assert_allclose(b, a, rtol=0, atol=4e-6)
  fresh = checkpoint.resize(
    own, there, PARAMS, layout, mesh_of(2), reset_memory=True
  )
  assert not any(map(np.any, read_outstanding(own, fresh, 2)))


def test_it_may_be_around_and_inside_of_codecs_with_memory():
  inside = codecs.momentum_correction(halves(), masking=False)
  tx = transforms.exchange("data", inside)
  states = resize_all(tx, fill(tx), PARAMS, COUNTS)
  for state, workers in zip(states, COUNTS, strict=True):
    for reduced in state.codec_state.value:
      assert reduced.first.momentum.shape[0] == workers
      assert reduced.first.inner["twice"].shape[0] == workers
  twice = codecs.momentum_correction(inside, masking=False)
  with pytest.raises(ValueError, match="must remember no 'momentum' inside"):
    resize_all(transforms.exchange("data", twice), (), PARAMS, COUNTS)


def test_parts_of_all_workers_and_what_they_share_go_on():
  tx = transforms.exchange("data", drift())
  first = fill(tx)

  def means(state, leaf):
    own, row, _ = state.codec_state.value[leaf].first
    rest = np.asarray(row, np.float64).ravel()[: own[0].size]
    return np.asarray(own, np.float64).mean(0).ravel() + rest

  for state in resize_all(tx, first, PARAMS, COUNTS):
    for leaf, kept in enumerate(first.codec_state.value):
      np.testing.assert_allclose(
        means(state, leaf), means(first, leaf), rtol=0, atol=4e-6
      )
      shared = state.codec_state.value[leaf].first[2].value
      np.testing.assert_array_equal(shared, kept.first[2].value)
  signs = transforms.exchange("data", codecs.sign())
  layout, _ = saved_like(tx, PARAMS, 4)
  with pytest.raises(ValueError, match="`tx` must have an offset for 'b'"):
    checkpoint.resize(signs, first, PARAMS, layout, mesh_of(2))


@dataclasses.dataclass(frozen=True)
class silent(halves):
  """Does not say what it remembers."""

  memory_parts = ()
  read_memory = codecs.Codec.read_memory
  write_memory = codecs.Codec.write_memory


def test_a_codec_that_does_not_say_what_it_remembers_is_refused():
  tx = transforms.exchange("data", silent())
  layout, like = saved_like(tx, PARAMS, 4)
  state = fill_randomly(like)
  with pytest.raises(ValueError, match=r"what it remembers .*got .*silent\(\)"):
    checkpoint.resize(tx, state, PARAMS, layout, mesh_of(2))
  same = checkpoint.resize(tx, state, PARAMS, layout, mesh_of(4))
  jax.tree.map(np.testing.assert_array_equal, same, state)


def test_metrics_report_the_norm_of_what_is_to_be_sent():
  tx = transforms.exchange("data", halves(), method="gather")
  _, like = saved_like(tx, PARAMS, 4)
  state = jax.tree.map(jnp.asarray, fill_randomly(like))
  rows = sum(
    np.square(np.asarray(a) / 2).reshape(4, -1).sum(1)
    for a in jax.tree.leaves(state.codec_state)
  )
  found = jaxmotion.metrics(state)["exchange/error_norm_max"]
  assert found == pytest.approx(np.sqrt(rows.max()), rel=1e-5)


def test_sharded_optimizers_keep_it():
  tx = transforms.sharded("data", optax.sgd(0.1), gradient_codec=halves())
  first = fill(tx)
  for state, workers in zip(
    resize_all(tx, first, PARAMS, COUNTS), COUNTS, strict=True
  ):
    _, one = resize_all(tx, state, PARAMS, (workers, 1))
    cut, whole = one.codec_state.value
    errors = [np.ravel(a["twice"][0]) / 2 for a in cut]
    errors += [np.ravel(a.first["twice"][0]) / 2 for a in whole]
    if workers == COUNTS[0]:
      expected = errors
    for a, b in zip(expected, errors, strict=True):
      np.testing.assert_allclose(b, a, rtol=0, atol=4e-6)
