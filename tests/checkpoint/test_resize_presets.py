"""States of published algorithms that continue on other numbers of workers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmotion
from jaxmotion import checkpoint, codecs, core, presets, transforms
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
}
COUNTS = (4, 2, 8, 3)


def fill(tx):
  """A state of four workers whose arrays are random."""
  return fill_randomly(saved_like(tx, PARAMS, 4)[1])


def codec_states(tx_state):
  """The states of all arrays of a chain's only exchange."""
  is_exchange = lambda n: isinstance(n, transforms.ExchangeState)
  found = jax.tree.leaves(tx_state, is_leaf=is_exchange)
  (exchange,) = filter(is_exchange, found)
  return [part for part in exchange.codec_state.value if part.first != ()]


def mean(rows, size=None):
  rows = np.asarray(rows, np.float64)
  flat = rows.reshape(rows.shape[0], -1)[:, :size]
  return flat.mean(0)


def assert_close(found, expected):
  np.testing.assert_allclose(found, expected, rtol=0, atol=4e-6)


def test_momenta_and_errors_of_dgc_keep_their_means():
  tx = presets.dgc("data", min_size=0, warmup=2)
  first = jax.tree.map(forget_second, fill(tx), is_leaf=is_momentum_of_mean)
  states = resize_all(tx, first, PARAMS, COUNTS)
  errors = [read_errors(tx, s, n) for s, n in zip(states, COUNTS, strict=True)]
  momenta = [
    [
      mean(momentum_rows(part), leaf.size)
      for part, leaf in zip(
        codec_states(s), jax.tree.leaves(PARAMS), strict=True
      )
    ]
    for s in states
  ]
  for kind in (errors, momenta):
    for later in kind[1:]:
      for a, b in zip(kind[0], later, strict=True):
        assert np.abs(a).max() > 0.1
        assert_close(b, a)


def is_momentum_of_mean(node):
  return hasattr(node, "second") and hasattr(node.second, "momentum")


def forget_second(node):
  """The mean of momenta gets no momentum of its own."""
  if not is_momentum_of_mean(node):
    return node
  zeros = np.zeros_like(node.second.momentum)
  return node._replace(second=node.second._replace(momentum=zeros))


def momentum_rows(part):
  """Momenta of all workers, of which each has rows for all in two phases."""
  momentum = part.first.momentum
  return momentum.reshape(momentum.shape[0], -1)


def read_errors(tx, state, workers):
  """What is still to be sent, by the state that keeps only the mean."""
  _, one = resize_all(tx, state, PARAMS, (workers, 1))
  return [
    np.asarray(part.first.inner.memory.value[0], np.float64).ravel()
    for part in codec_states(one)
    if part.first.inner  # Vectors travel whole and have no error.
  ]


def test_what_ef21_has_sent_keeps_the_mean_that_all_know():
  tx = presets.ef21_sgdm("data", min_size=0)
  first = fill(tx)
  # As after some steps: the mean is that of what workers have sent.
  is_state = lambda n: hasattr(n, "own") and hasattr(n, "mean")
  first = jax.tree.map(
    lambda n: (
      n._replace(mean=core.Shared(n.own.mean(0, keepdims=True), ("data",)))
      if is_state(n)
      else n
    ),
    first,
    is_leaf=is_state,
  )
  for state in resize_all(tx, first, PARAMS, COUNTS):
    for part, old in zip(codec_states(state), codec_states(first), strict=True):
      known = np.asarray(part.first.mean.value)
      np.testing.assert_array_equal(known, old.first.mean.value)
      assert_close(mean(part.first.own), known.ravel())
  # Another codec of differences goes on from the same mean.
  other = presets.ef21_sgdm("data", codec=codecs.topk(density=0.5), min_size=0)
  _, state = resize_all(tx, first, PARAMS, (4, 3), other)
  for part, old in zip(codec_states(state), codec_states(first), strict=True):
    assert_close(part.first.mean.value, old.first.mean.value)


def test_errors_of_both_phases_of_onebit_are_kept():
  tx = transforms.exchange("data", codecs.onebit())

  def outstanding(state):
    found = []
    for part, leaf in zip(
      state.codec_state.value, jax.tree.leaves(PARAMS), strict=True
    ):
      shared = np.asarray(part.first.of_mean, np.float64).ravel()[: leaf.size]
      found.append(mean(part.first.own, leaf.size) + shared)
    return found

  first, *others = map(outstanding, resize_all(tx, fill(tx), PARAMS, COUNTS))
  for found in others:
    for a, b in zip(first, found, strict=True):
      assert np.abs(a).max() > 0.1
      assert_close(b, a)


def test_a_state_that_no_codec_of_today_continues_is_refused_by_its_name():
  signs = transforms.exchange("data", codecs.feedback(codecs.sign()))
  for codec, noun in [
    (codecs.ef21(codecs.sign()), "a memory of what was sent for 'b'"),
    (
      codecs.momentum_correction(codecs.feedback(codecs.sign()), masking=False),
      "a momentum for 'b'",
    ),
  ]:
    tx = transforms.exchange("data", codec)
    with pytest.raises(ValueError, match=f"`tx` must have {noun}"):
      resize_all(tx, fill(tx), PARAMS, (4, 2), signs)


def loss_fn(params, batch):
  return sum(jnp.sum(p * batch.mean()) for p in jax.tree.leaves(params))


@functools.cache
def make_local(workers, weighted):
  outer = optax.chain(
    transforms.exchange("data", codecs.feedback(codecs.sign())),
    optax.sgd(0.5, momentum=0.5),
  )
  return transforms.make_train_step(
    loss_fn,
    transforms.local_updates(
      optax.adam(0.1), outer, every=4, fragments=2, delay=1
    ),
    make_mesh(workers),
    weight_fn=jnp.sum if weighted else None,
  )


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
  init, _ = make_local(4, weighted)
  first = fill(init)
  if weighted:
    rows = jaxmotion.PerWorker(np.abs(first.weights.value) + 0.1)
    first = first._replace(weights=rows)
  rng = np.random.default_rng(1)
  anchor = jax.tree.map(lambda a: rng.normal(size=a.shape), PARAMS)
  expected = local_sums(anchor, first)
  for state, workers in zip(
    resize_all(init, first, PARAMS, COUNTS), COUNTS, strict=True
  ):
    assert jax.tree.leaves(state.params)[0].shape[0] == workers
    for kept in ("flying", "count"):
      jax.tree.map(
        np.testing.assert_array_equal,
        getattr(state, kept),
        getattr(first, kept),
      )
    found = local_sums(anchor, state)
    for name in PARAMS:
      np.testing.assert_allclose(found[name], expected[name], atol=2e-5)
    momenta = [jax.tree.leaves(s.outer[0][1]) for s in (state, first)]
    jax.tree.map(np.testing.assert_array_equal, *momenta)


def test_local_updates_train_on_with_other_workers():
  batch = np.ones((24, 1), np.float32)
  init, step = make_local(4, False)
  state = init(PARAMS)
  state, _ = step(state, batch)
  layout = checkpoint.describe_state(init, PARAMS, make_mesh(4))
  init, step = make_local(2, False)
  own = checkpoint.resize(init, state.opt_state, PARAMS, layout, make_mesh(2))
  state = init(state.params)._replace(opt_state=own)
  for _ in range(4):
    state, loss = step(state, batch)
  assert np.isfinite(loss) and np.abs(state.params["w"]).min() > 0.01


EF21_OF_TOPK = codecs.ef21(codecs.topk(density=0.5))
EMPTY_LEAVES = {
  "onebit": {"codec": codecs.onebit()},
  "ef21": {"codec": codecs.ef21(codecs.sign())},
  "two_phase": {
    "codec": codecs.feedback(codecs.sign()),
    "method": "two_phase",
  },
}


@pytest.mark.parametrize("name", EMPTY_LEAVES)
def test_arrays_without_elements_are_resized(name):
  params = {"w": np.zeros(257, np.float32), "e": np.zeros((0, 3), np.float32)}
  tx = transforms.exchange("data", **EMPTY_LEAVES[name])
  layout, like = saved_like(tx, params, 4)
  state = jax.tree.map(lambda a: np.ones(a.shape, a.dtype), like)
  for workers in (1, 2, 8):
    resize_all(tx, state, params, (4, workers))
    other = transforms.exchange("data", EF21_OF_TOPK)
    if name == "ef21":
      checkpoint.resize(other, state, params, layout, mesh_of(workers))
