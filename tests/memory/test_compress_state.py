"""Optimizer state that is encoded between updates."""

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jaxmotion
from jaxmotion import codecs, memory, wire
from jaxmotion.core import tree_bytes as nbytes
from jaxmotion.memory import (
  EncodedLeaf,
  _compress_state,
  compress_state,
  decompress_state,
)
from jaxmotion.testing import check_transform
from tests.compilations import compilations
from tests.memory.digits import learn_digits

RNG = np.random.default_rng(0)
PARAMS = {
  "bias": jnp.zeros(70),
  "kernel": jnp.asarray(RNG.normal(size=(64, 70)), jnp.float32),
}
EACH_MEMORY_KIND = pytest.mark.parametrize("memory_kind", [None, "pinned_host"])
EXACT = dict(first=codecs.identity(), second=codecs.identity(), min_leaf_size=0)


def multi_steps(tx):
  return optax.MultiSteps(tx, 2).gradient_transformation()


def compress_with(**options):
  return functools.partial(compress_state, **options)


def wrapped(compress):
  """Returns optimizers with `compress_state` inside, outside and between."""
  return {
    "clip_masked": optax.chain(
      optax.clip_by_global_norm(1.0),
      optax.masked(
        compress(optax.adamw(1e-2)), {"bias": False, "kernel": True}
      ),
    ),
    "inject": compress(
      optax.inject_hyperparams(optax.sgd)(
        learning_rate=0.1, momentum=0.9, nesterov=True
      )
    ),
    "multi_steps": multi_steps(compress(optax.lion(1e-2))),
    "of_multi_steps": compress(
      multi_steps(
        optax.partition(
          {"x": optax.adam(1e-2), "y": optax.sgd(1e-2)},
          {"bias": "y", "kernel": "x"},
        )
      )
    ),
    "if_finite": optax.apply_if_finite(
      compress(optax.chain(with_key_state(), optax.rmsprop(1e-2))), 3
    ),
  }


def with_key_state():
  """Returns a transformation whose state is a random key, not numbers."""

  def update(updates, state, params=None):
    return updates, state

  return optax.GradientTransformation(lambda _: jax.random.key(3), update)


def train(tx, params=PARAMS, steps=4):
  """Trains on a small quadratic; returns parameters and state."""

  @jax.jit
  def step(params, state):
    grads = jax.tree.map(lambda p: p - 0.3, params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  state = jax.jit(tx.init)(params)
  for _ in range(steps):
    params, state = step(params, state)
  return params, state


def tree_bits(tree):
  def array_bits(a):
    is_key = jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(a) if is_key else a).tobytes()

  return [array_bits(a) for a in jax.tree.leaves(tree)]


def tree_types(tree):
  return jax.tree.map(jax.typeof, tree)


def state_memory_kinds(state):
  """Returns the memory kinds of (encoded leaves, all other leaves)."""
  leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, EncodedLeaf))
  found = [set(), set()]
  for x in leaves:
    for a in jax.tree.leaves(x):
      found[not isinstance(x, EncodedLeaf)].add(a.sharding.memory_kind)
  return tuple(found)


@functools.cache
def train_plain(name):
  return train(wrapped(lambda tx: tx)[name])


@pytest.mark.parametrize(
  ("name", "memory_kind"),
  [
    *((name, "pinned_host") for name in wrapped(compress_with())),
    # Pinned host memory takes the same path and moves payloads besides.
    ("of_multi_steps", None),
  ],
)
def test_an_identity_changes_nothing_in_any_chain(name, memory_kind):
  params, state = train(
    wrapped(compress_with(**EXACT, memory_kind=memory_kind))[name]
  )
  expected, plain = train_plain(name)
  assert state_memory_kinds(state) == ({memory_kind or "device"}, {"device"})
  assert tree_bits(params) == tree_bits(expected)
  assert tree_bits(plain_state(state)) == tree_bits(plain)


def plain_state(state):
  """Returns the state that training without `compress_state` has."""
  one = lambda x: isinstance(x, _compress_state.CompressedState)
  return jax.tree.map(
    lambda x: x.inner if one(x) else x, decompress_state(state), is_leaf=one
  )


def test_it_is_a_valid_transform_beside_an_exchange():
  mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
  int4 = codecs.feedback(codecs.uniform(bits=4, rounding="stochastic"))
  tx = optax.chain(
    jaxmotion.exchange("data", int4),
    compress_state(optax.adam(1e-2), memory_kind="pinned_host"),
  )
  check_transform(tx, mesh, PARAMS)


@EACH_MEMORY_KIND
def test_a_step_compiles_once_and_reuses_the_buffers(memory_kind):
  tx = compress_state(optax.adam(1e-2), memory_kind=memory_kind)

  @functools.partial(jax.jit, donate_argnums=1)
  def step(grads, state):
    return tx.update(grads, state)

  first = jax.jit(tx.init)(PARAMS)
  before = tree_types(first)
  _, state = step(PARAMS, first)
  assert all(a.is_deleted() for a in jax.tree.leaves(first))
  count = compilations()
  _, state = step(PARAMS, state)
  assert compilations() == count
  assert tree_types(state) == before and int(state.steps) == 2


def test_random_bits_depend_on_the_seed_and_the_step():
  grads = jax.tree.map(lambda p: p / 3, PARAMS)

  @functools.partial(jax.jit, static_argnums=0)
  def update(seed, steps):
    tx = compress_state(optax.sgd(1.0, momentum=0.5), seed=seed)
    state = tx.init(PARAMS)._replace(steps=steps)
    return tx.update(grads, state)[1].inner

  def run(seed, steps):
    return tree_bits(update(seed, jnp.int32(steps)))

  assert run(0, 0) == run(0, 0)
  assert run(0, 0) != run(1, 0) and run(0, 0) != run(0, 1)


def test_the_state_has_the_bytes_of_the_payloads_a_quarter_of_plain():
  params = {"w": jnp.ones((512, 256)), "b": jnp.ones(256)}
  state = jax.jit(compress_state(optax.adam(1e-2)).init)(params)
  encoded = [state.inner[0].mu["w"], state.inner[0].nu["w"]]
  expected = [wire.payload_bytes(x.codec, params["w"]) for x in encoded]
  assert [nbytes(x) for x in encoded] == expected
  assert nbytes(state) == sum(expected) + 2 * 256 * 4 + 4 + 4
  assert 2 * params["w"].nbytes / sum(expected) > 3.9


def test_the_state_field_decides_not_the_parameter_name():
  params = {"nu": jnp.ones((64, 64)), "mu": jnp.ones((64, 63))}
  adam = jax.eval_shape(compress_state(optax.adam(1e-2)).init, params).inner[0]
  first, second = adam.mu["nu"].codec, adam.nu["nu"].codec
  assert isinstance(first, codecs.uniform)
  assert isinstance(second, codecs.nonnegative)
  # Fewer than `min_leaf_size` elements.
  assert adam.mu["mu"].shape == adam.nu["mu"].shape == (64, 63)
  assert not isinstance(adam.mu["mu"], EncodedLeaf)


def test_the_first_rule_that_matches_wins_over_the_field():
  half = codecs.cast("bfloat16")
  tx = compress_state(
    optax.chain(optax.scale_by_rss(), optax.scale_by_adam()),
    second=None,
    sums=None,
    rules=[("mu/kernel", None), ("^0/sum_of_squares/kernel", half)],
    min_leaf_size=0,
  )
  rss, adam = jax.eval_shape(tx.init, PARAMS).inner
  assert rss.sum_of_squares["kernel"].codec == half
  assert not isinstance(rss.sum_of_squares["bias"], EncodedLeaf)
  assert not isinstance(adam.mu["kernel"], EncodedLeaf)
  assert isinstance(adam.mu["bias"], EncodedLeaf)
  assert not isinstance(adam.nu["kernel"], EncodedLeaf)


def transfer_targets(jaxpr):
  """Returns the target of each transfer, in order: h for host, d for device."""
  spaces = {"Host": "h", "Device": "d"}
  return "".join(
    spaces[space.name]
    for eqn in jaxpr.eqns
    if eqn.primitive.name == "device_put"
    for space in eqn.params["devices"]
  )


def test_a_transfer_waits_until_the_last_parameter_but_one_returned():
  params = {str(i): jnp.ones((8, 8)) for i in range(4)}
  tx = compress_state(
    optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    min_leaf_size=0,
    memory_kind="pinned_host",
  )
  state = jax.eval_shape(tx.init, params)
  traced = jax.make_jaxpr(tx.update)(params, state, params)
  # For each parameter, two moments of two arrays each are fetched and sent.
  assert transfer_targets(traced.jaxpr) == "ddddhhhh" * 4
  # The third and the fourth parameter wait, once for each moment.
  assert str(traced).count("= optimization_barrier") == 2 * 2


def test_decoding_waits_on_the_device_too_without_transfers():
  params = {str(i): jnp.ones((8, 8)) for i in range(4)}
  tx = compress_state(optax.lion(1e-2), min_leaf_size=0)
  state = jax.eval_shape(tx.init, params)
  traced = jax.make_jaxpr(tx.update)(params, state, params)
  assert transfer_targets(traced.jaxpr) == ""
  assert str(traced).count("= optimization_barrier") == 2


def test_a_norm_over_the_state_fetches_all_of_it():
  def init(params):
    return optax.TraceState(jax.tree.map(jnp.zeros_like, params))

  def update(updates, state, params=None):
    norm = optax.tree.norm(state.trace)
    trace = jax.tree.map(lambda g, t: g + t / (1 + norm), updates, state.trace)
    return trace, optax.TraceState(trace)

  tx = optax.GradientTransformation(init, update)
  compressed = compress_state(tx, **EXACT, memory_kind="pinned_host")
  state = jax.eval_shape(compressed.init, PARAMS)
  traced = jax.make_jaxpr(compressed.update)(PARAMS, state)
  assert transfer_targets(traced.jaxpr) == "ddhh"
  assert tree_bits(train(compressed)[0]) == tree_bits(train(tx)[0])


def test_without_pinned_memory_init_warns_and_the_state_stays(monkeypatch):
  device = SimpleNamespace(platform="cpu", addressable_memories=lambda: [])
  monkeypatch.setattr(jax, "local_devices", lambda: [device])
  tx = compress_state(optax.lion(1e-2), memory_kind="pinned_host")
  with pytest.warns(UserWarning, match="which the cpu backend does not have"):
    state = jax.jit(tx.init)(PARAMS)
  _, state = jax.jit(tx.update)(PARAMS, state, PARAMS)
  assert state_memory_kinds(state) == ({"device"}, {"device"})


def test_a_rejected_step_leaves_the_state_bit_for_bit():
  tx = optax.apply_if_finite(compress_state(optax.lion(1e-2)), 3)
  update = jax.jit(tx.update)
  _, state = update(PARAMS, jax.jit(tx.init)(PARAMS), PARAMS)
  bad = {**PARAMS, "bias": PARAMS["bias"].at[0].set(jnp.nan)}
  _, after = update(bad, state, PARAMS)
  assert tree_bits(after.inner_state) == tree_bits(state.inner_state)
  assert not after.last_finite


@EACH_MEMORY_KIND
def test_a_checkpoint_restores_the_state(memory_kind, tmp_path):
  ocp = pytest.importorskip("orbax.checkpoint")
  tx = compress_state(optax.lion(1e-2), memory_kind=memory_kind)
  update = jax.jit(tx.update)
  first = jax.jit(tx.init)(PARAMS)
  _, state = update(PARAMS, first, PARAMS)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", state)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / "state", first)
  assert tree_bits(restored) == tree_bits(state)
  # Wherever the state was restored to, an update moves it back.
  _, expected = update(PARAMS, state, PARAMS)
  _, found = update(PARAMS, restored, PARAMS)
  assert tree_bits(found) == tree_bits(expected)
  assert tree_types(found) == tree_types(state)


def test_digits_are_learned_as_well_as_with_plain_state():
  plain, loss = learn_digits(optax.adam(3e-3))
  found, found_loss = learn_digits(
    compress_state(optax.adam(3e-3), memory_kind="pinned_host")
  )
  assert plain.min() > 0.96 and loss.max() < 0.02
  assert np.abs(found - plain).max() <= 0.005
  assert found_loss.max() < 1.5 * loss.max()


def test_second_moments_on_evenly_spaced_levels_diverge():
  naive = compress_state(
    optax.adam(3e-3), second=codecs.uniform(bits=8, block=256)
  )
  accuracy, loss = learn_digits(naive, steps=100)
  assert accuracy.max() < 0.5 and not loss.min() < 10


@pytest.mark.parametrize(
  ("error", "match", "options"),
  [
    (TypeError, "`tx` must be an optax.Grad", {"tx": "adam"}),
    (TypeError, "`first` must be a codec of arrays", {"first": 8}),
    (
      TypeError,
      "`second` must be a codec",
      {"second": codecs.buckets(codecs.sign())},
    ),
    (
      ValueError,
      "`first` must be a codec without state",
      {"first": codecs.feedback(codecs.sign())},
    ),
    (TypeError, "`rules` must be pairs of", {"rules": ["mu"]}),
    (ValueError, "`rules` must have regular", {"rules": [("(", None)]}),
    (
      ValueError,
      "`min_leaf_size` must be an integer >= 0",
      {"min_leaf_size": -1},
    ),
    (ValueError, "`seed` must be an integer in", {"seed": -1}),
    (ValueError, "`memory_kind` must be one of", {"memory_kind": "disk"}),
  ],
)
def test_invalid_arguments_are_refused(error, match, options):
  with pytest.raises(error, match=match):
    compress_state(**{"tx": optax.adam(1e-2), **options})


def test_rules_or_states_without_effect_are_refused():
  tx = compress_state(optax.adam(1e-2), rules=[("mu/kernle", None)])
  with pytest.raises(ValueError, match="'mu/kernle', which matches none of"):
    tx.init(PARAMS)
  tx = compress_state(optax.adadelta(1e-2))
  with pytest.raises(ValueError, match="got.*'1/e_g/bias'"):
    tx.init(PARAMS)
  # An optimizer without state has nothing to encode.
  compress_state(optax.sgd(1e-2)).init(PARAMS)


def test_a_state_that_is_encoded_already_is_refused():
  tx = compress_state(compress_state(optax.adam(0.1)))
  with pytest.raises(ValueError, match="`tx` must have no encoded state"):
    tx.init({"w": jnp.ones((64, 128))})


def encoded_codecs(tx, params):
  """Returns the codec of each encoded leaf, by its path."""
  state = jax.eval_shape(tx.init, params).inner
  leaves = jax.tree.leaves_with_path(
    state, is_leaf=lambda x: isinstance(x, EncodedLeaf)
  )
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): x.codec
    for path, x in leaves
    if isinstance(x, EncodedLeaf)
  }


def test_accumulators_of_adafactor_and_adagrad_are_encoded():
  params = {
    "w": jax.ShapeDtypeStruct((5000, 128), jnp.float32),
    "b": jax.ShapeDtypeStruct((5000,), jnp.float32),
  }
  adafactor = compress_state(optax.adafactor(1e-2, momentum=0.9))
  found = encoded_codecs(adafactor, params)
  second = codecs.nonnegative(rounding="stochastic")
  # Of a factored matrix the row and the column, here one of them is small.
  assert {path for path, codec in found.items() if codec == second} == {
    "0/v_col/w",
    "0/v/b",
  }
  assert {path for path in found if "ema" in path} == {"4/ema/b", "4/ema/w"}
  adagrad = encoded_codecs(compress_state(optax.adagrad(1e-2)), params)
  wide = codecs.nonnegative(bits=16, rounding="stochastic")
  assert adagrad == {f"0/sum_of_squares/{name}": wide for name in "bw"}


def test_a_field_v_of_another_optimizer_is_no_second_moment():
  class Signed(NamedTuple):
    mu: Any
    v: Any

  tx = optax.GradientTransformation(
    lambda params: Signed(params, params),
    lambda updates, state, params=None: (updates, state),
  )
  params = {"kernel": jnp.ones((64, 64))}
  assert set(encoded_codecs(compress_state(tx), params)) == {"mu/kernel"}


def test_a_sum_of_squares_keeps_its_relative_accuracy():
  steps, rng = 600, np.random.default_rng(0)
  grads = jnp.asarray(
    rng.normal(size=(steps, 64)) * 10.0 ** rng.uniform(-2, 2, 64)
  )

  def run(tx):
    def step(state, g):
      return tx.update({"w": g}, state)[1], None

    return jax.lax.scan(step, tx.init({"w": grads[0]}), grads)[0]

  @jax.jit
  def both():
    plain = optax.scale_by_rss()
    wide = compress_state(plain, min_leaf_size=0)
    narrow = compress_state(plain, sums=codecs.nonnegative(), min_leaf_size=0)
    return (
      run(plain).sum_of_squares["w"],
      decompress_state(run(wide)).inner.sum_of_squares["w"],
      decompress_state(run(narrow)).inner.sum_of_squares["w"],
    )

  exact, wide, narrow = map(np.asarray, both())
  error = wide / exact - 1
  # The roundings of a random walk, 2^-12 of the sum each at the most likely.
  assert np.abs(error).max() < 0.1 and abs(error.mean()) < 0.01
  # Eight bits to nearest do not grow any more.
  assert np.median(narrow / exact) < 0.5


def test_adafactor_learns_digits_as_well_with_encoded_state():
  tx = optax.adafactor(1e-2, min_dim_size_to_factor=100, momentum=0.9)
  expected, expected_loss = learn_digits(tx, steps=100)
  found, found_loss = learn_digits(
    compress_state(tx, min_leaf_size=100), steps=100
  )
  assert expected.min() > 0.93
  assert np.abs(found - expected).max() <= 0.01
  assert found_loss.max() < 1.2 * expected_loss.max()


def test_adamw_8bit_is_adamw_with_the_defaults_of_its_model():
  params = {"w": jnp.ones((64, 64)), "b": jnp.ones(4095)}
  state = jax.jit(memory.adamw_8bit().init)(params)
  encoded = [state.inner[0].mu["w"], state.inner[0].nu["w"]]
  assert [x.codec.block for x in encoded] == [256, 256]
  assert nbytes(state) == sum(map(nbytes, encoded)) + 2 * 4 * 4095 + 4 + 4
  exact = memory.adamw_8bit(min_leaf_size=64**2 + 1)
  same = optax.adamw(1e-3, weight_decay=1e-2)
  for tx in (exact, same):
    tree = jax.jit(tx.init)(params)
    updates, tree = jax.jit(tx.update)(params, tree, params)
    np.testing.assert_allclose(updates["w"][0, 0], -1e-3 * 1.01, rtol=1e-5)


def test_a_mask_is_made_of_bools():
  with pytest.raises(TypeError, match="`mask`"):
    memory.adamw_8bit(mask={"w": "yes"})
