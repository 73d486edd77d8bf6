"""States of all kinds of codecs continue on other workers.

No room of the library names the codecs of this file, which remember something:
whatever asks what they remember asks their own methods.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmotion
from jaxmotion import checkpoint, codecs, core, presets, transforms
from jaxmotion.codecs import MemoryPart
from tests.checkpoint.helpers import (
  COUNTS,
  abstract_mesh,
  assert_equal,
  fill_state,
  resize_all,
  saved_like,
)
from tests.meshes import mesh_of

PARAMS = {
  "w": np.zeros((25, 26), np.float32),  # Two phases on 3 workers or more.
  "b": np.zeros(5, np.float32),
  "e": np.zeros((0, 3), np.float32),
}
SIGNS = codecs.feedback(codecs.sign())


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


AROUND_OWN = codecs.momentum_correction(halves(), masking=False)
CASES = {
  "dgc": presets.dgc("data", min_size=0, warmup=0),
  "ef21": presets.ef21_sgdm("data", min_size=0),
  "onebit": transforms.exchange("data", codecs.onebit()),
  "own": transforms.exchange("data", halves()),
  "own_rounds": transforms.exchange("data", drift()),
  "sharded": transforms.sharded(
    "data",
    optax.adam(0.1),
    gradient_codec=SIGNS,
    weight_codec=codecs.uniform(bits=4),
  ),
  "sharded_own": transforms.sharded(
    "data", optax.sgd(0.1), gradient_codec=halves()
  ),
}


def read_means(tx, state, workers):
  """What workers remember on average, by the state of one worker."""
  return jax.tree.leaves(resize_all(tx, state, PARAMS, (workers, 1))[1])


@pytest.mark.parametrize("name", CASES)
def test_means_of_what_workers_remember_are_kept(name):
  tx = CASES[name]
  states = resize_all(tx, fill_state(tx, PARAMS), PARAMS)
  first, *others = (
    read_means(tx, state, n) for state, n in zip(states, COUNTS, strict=True)
  )
  assert (
    max(np.abs(a).max(initial=0) for a in first if a.dtype == np.float32) > 0.1
  )
  for found in others:
    for a, b in zip(first, found, strict=True):
      np.testing.assert_allclose(b, a, rtol=0, atol=8e-6)
  for state in states[1:]:  # All workers know these.
    assert_equal(core.shared_parts(state), core.shared_parts(states[0]))


def test_a_codec_of_the_same_memory_goes_on_and_back():
  own, signs = CASES["own"], transforms.exchange("data", SIGNS)
  state = fill_state(own, PARAMS)
  _, there = resize_all(own, state, PARAMS, (4, 3), signs)
  _, back = resize_all(signs, there, PARAMS, (3, 4), own)
  pairs = zip(*(read_means(own, s, 4) for s in (state, back)), strict=True)
  for a, b in pairs:
    np.testing.assert_allclose(b, a, rtol=0, atol=4e-6)
  layout, _ = saved_like(signs, PARAMS, 3)
  fresh = checkpoint.resize(
    own, there, PARAMS, layout, abstract_mesh(2), reset_memory=True
  )
  assert not any(map(np.any, jax.tree.leaves(fresh.codec_state)))


def test_another_codec_of_differences_goes_on_from_the_mean():
  def find_memories(state):
    is_memory = lambda n: hasattr(n, "own") and hasattr(n, "mean")
    leaves = jax.tree.leaves(state, is_leaf=is_memory)
    return list(filter(is_memory, leaves))

  other = presets.ef21_sgdm("data", codec=codecs.topk(density=0.5), min_size=0)
  state = fill_state(CASES["ef21"], PARAMS)
  _, moved = resize_all(CASES["ef21"], state, PARAMS, (4, 3), other)
  old, new = map(find_memories, (state, moved))
  assert old
  for a, b in zip(old, new, strict=True):
    mean = np.mean(a.own, 0, keepdims=True)
    np.testing.assert_allclose(b.mean.value, mean, rtol=0, atol=4e-6)


def test_two_memories_of_one_name_are_refused():
  twice = codecs.momentum_correction(AROUND_OWN, masking=False)
  with pytest.raises(ValueError, match="must remember no 'momentum' inside"):
    resize_all(transforms.exchange("data", twice), (), PARAMS)


@dataclasses.dataclass(frozen=True)
class silent(halves):
  """Does not say what it remembers."""

  memory_parts = ()
  read_memory = codecs.Codec.read_memory
  write_memory = codecs.Codec.write_memory


def test_a_codec_that_does_not_say_what_it_remembers_is_refused():
  tx = transforms.exchange("data", silent())
  layout, _ = saved_like(tx, PARAMS, 4)
  state = fill_state(tx, PARAMS)
  with pytest.raises(ValueError, match=r"what it remembers .*got .*silent\(\)"):
    checkpoint.resize(tx, state, PARAMS, layout, abstract_mesh(2))
  same = checkpoint.resize(tx, state, PARAMS, layout, abstract_mesh(4))
  assert_equal(same, state)


def test_metrics_report_the_norm_of_what_is_to_be_sent():
  tx = transforms.exchange("data", halves(), method="gather")
  state = jax.tree.map(jnp.asarray, fill_state(tx, PARAMS))
  rows = sum(
    np.square(np.asarray(a) / 2).reshape(4, -1).sum(1)
    for a in jax.tree.leaves(state.codec_state)
  )
  found = jaxmotion.metrics(state)["exchange/error_norm_max"]
  assert found == pytest.approx(np.sqrt(rows.max()), rel=1e-5)


@pytest.mark.parametrize(
  ("codec", "noun"),
  [
    (codecs.ef21(codecs.sign()), "a memory of what was sent"),
    (codecs.momentum_correction(SIGNS, masking=False), "a momentum"),
    (drift(), "an offset"),
  ],
)
def test_a_state_that_no_codec_of_today_continues_is_refused(codec, noun):
  tx, signs = (transforms.exchange("data", c) for c in (codec, SIGNS))
  with pytest.raises(ValueError, match=f"`tx` must have {noun} for 'b'"):
    resize_all(tx, fill_state(tx, PARAMS), PARAMS, (4, 2), signs)


def make_local(weighted):
  """Returns `init` of local updates."""
  outer = optax.chain(
    transforms.exchange("data", codecs.feedback(codecs.sign())),
    optax.sgd(0.5, momentum=0.5),
  )
  scheme = transforms.local_updates(
    optax.adam(0.1), outer, every=4, fragments=2, delay=1
  )
  weight_fn = jnp.sum if weighted else None
  return transforms.make_train_step(
    abs, scheme, mesh_of(4), weight_fn=weight_fn
  )[0]


def local_sums(anchor, state):
  """What is still to be sent: changes by weight, leaf by leaf."""
  owners = {"b": 1, "w": 0}
  changes = {}
  for name, leaf in state.params.value.items():
    change = np.asarray(anchor[name], np.float64) - np.asarray(leaf)
    weights = np.ones(leaf.shape[0])
    if state.weights:
      weights = np.asarray(state.weights.value[:, owners[name]], np.float64)
    changes[name] = np.tensordot(weights, change, 1) / weights.sum()
  return changes


@pytest.mark.parametrize("weighted", [False, True])
def test_local_updates_keep_what_workers_have_changed(weighted):
  init, params = make_local(weighted), {k: PARAMS[k] for k in "wb"}
  first = fill_state(init, params)
  if weighted:
    rows = jaxmotion.PerWorker(np.abs(first.weights.value) + 0.1)
    first = first._replace(weights=rows)
  rng = np.random.default_rng(1)
  anchor = jax.tree.map(lambda a: rng.normal(size=a.shape), params)
  expected = local_sums(anchor, first)
  for state, workers in zip(
    resize_all(init, first, params), COUNTS, strict=True
  ):
    assert jax.tree.leaves(state.params)[0].shape[0] == workers
    assert_equal(state.flying, first.flying)
    assert_equal(state.count, first.count)
    found = local_sums(anchor, state)
    for name in params:
      np.testing.assert_allclose(found[name], expected[name], atol=2e-5)
    assert_equal(*(jax.tree.leaves(s.outer[0][1]) for s in (state, first)))
