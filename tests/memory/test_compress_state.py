"""Optimizer state that is encoded between updates."""

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmotion import codecs, memory, wire
from jaxmotion.core import tree_bytes as nbytes
from jaxmotion.memory import (
  EncodedLeaf,
  _compress_state,
  compress_state,
  decompress_state,
)
from tests.compilations import compilations

RNG = np.random.default_rng(0)
PARAMS = {
  "bias": jnp.zeros(70),
  "kernel": jnp.asarray(RNG.normal(size=(64, 70)), jnp.float32),
}
SIGN, OF_TREES = codecs.sign(), codecs.buckets(codecs.sign())
EXACT = dict(first=codecs.identity(), second=codecs.identity(), min_leaf_size=0)


def multi_steps(tx):
  return optax.MultiSteps(tx, 2).gradient_transformation()


def wrapped(compress):
  """Returns optimizers with `compress_state` inside, outside and between."""
  return {
    "inject_clip_masked": optax.chain(
      optax.clip_by_global_norm(1.0),
      optax.masked(
        compress(optax.inject_hyperparams(optax.adamw)(1e-2)),
        {"bias": False, "kernel": True},
      ),
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


def is_encoded(x):
  return isinstance(x, EncodedLeaf)


def tree_types(tree):
  return jax.tree.map(jax.typeof, tree)


def state_memory_kinds(state):
  """Returns the memory kinds of (encoded leaves, all other leaves)."""
  found = [set(), set()]
  for x in jax.tree.leaves(state, is_leaf=is_encoded):
    for a in jax.tree.leaves(x):
      found[not is_encoded(x)].add(a.sharding.memory_kind)
  return tuple(found)


@pytest.mark.parametrize(
  ("name", "memory_kind"),
  [
    *((name, "pinned_host") for name in wrapped(compress_state)),
    # Pinned host memory takes the same path and moves payloads besides.
    ("of_multi_steps", None),
  ],
)
def test_an_identity_changes_nothing_in_any_chain(name, memory_kind):
  compress = functools.partial(compress_state, **EXACT, memory_kind=memory_kind)
  params, state = train(wrapped(compress)[name])
  expected, plain = train(wrapped(lambda tx: tx)[name])
  assert state_memory_kinds(state) == ({memory_kind or "device"}, {"device"})
  assert tree_bits(params) == tree_bits(expected)
  assert tree_bits(plain_state(state)) == tree_bits(plain)


def plain_state(state):
  """Returns the state that training without `compress_state` has."""
  one = lambda x: isinstance(x, _compress_state.CompressedState)
  return jax.tree.map(
    lambda x: x.inner if one(x) else x, decompress_state(state), is_leaf=one
  )


@pytest.mark.parametrize("memory_kind", [None, "pinned_host"])
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


def test_a_rule_decides_else_the_state_field_not_the_parameter_name():
  params = {"nu": jnp.ones((64, 64)), "mu": jnp.ones((64, 63))}
  # Of the other parameter, states have fewer than `min_leaf_size` elements.
  assert encoded_codecs(compress_state(optax.adam(1e-2)), params) == {
    "0/mu/nu": codecs.uniform(bits=8, block=256, rounding="stochastic"),
    "0/nu/nu": codecs.nonnegative(rounding="stochastic"),
  }
  half = codecs.cast("bfloat16")
  tx = compress_state(
    optax.chain(optax.scale_by_rss(), optax.scale_by_adam()),
    first=SIGN,
    second=None,
    sums=None,
    rules=[("mu/kernel", None), ("^0/sum_of_squares/kernel", half)],
    min_leaf_size=0,
  )
  assert encoded_codecs(tx, PARAMS) == {
    "0/sum_of_squares/kernel": half,
    "1/mu/bias": SIGN,
  }


def transfer_targets(jaxpr):
  """Returns the target of each transfer, in order: h for host, d for device."""
  spaces = {"Host": "h", "Device": "d"}
  return "".join(
    spaces[space.name]
    for eqn in jaxpr.eqns
    if eqn.primitive.name == "device_put"
    for space in eqn.params["devices"]
  )


@pytest.mark.parametrize(
  ("tx", "memory_kind", "targets", "barriers"),
  [
    # For each parameter, two moments of two arrays each are fetched and sent.
    # The third and the fourth parameter wait, once for each moment.
    (
      optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
      "pinned_host",
      "ddddhhhh" * 4,
      2 * 2,
    ),
    # Decoding waits on the device, too.
    (optax.lion(1e-2), None, "", 2),
  ],
  ids=["host", "device"],
)
def test_a_parameter_waits_until_the_last_but_one_is_encoded(
  tx, memory_kind, targets, barriers
):
  params = {str(i): jnp.ones((8, 8)) for i in range(4)}
  tx = compress_state(tx, min_leaf_size=0, memory_kind=memory_kind)
  state = jax.eval_shape(tx.init, params)
  traced = jax.make_jaxpr(tx.update)(params, state, params)
  assert transfer_targets(traced.jaxpr) == targets
  assert str(traced).count("= optimization_barrier") == barriers


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
  memories = [SimpleNamespace(kind=kind) for kind in ("device", "tape")]
  device = SimpleNamespace(
    platform="abacus", addressable_memories=lambda: memories
  )
  monkeypatch.setattr(jax, "local_devices", lambda: [device])
  tx = compress_state(optax.lion(1e-2), memory_kind="pinned_host")
  with pytest.warns(UserWarning) as seen:
    state = jax.jit(tx.init)(PARAMS)
  # One warning, by `init` alone.
  (warning,) = seen
  for part in ("'pinned_host'", "abacus backend", "device, tape"):
    assert part in str(warning.message)
  _, state = jax.jit(tx.update)(PARAMS, state, PARAMS)
  assert state_memory_kinds(state) == ({"device"}, {"device"})


def test_the_first_state_is_encoded_when_init_runs_not_while_it_compiles():
  # XLA folds operations on constants one element after another.
  params = jnp.zeros((256, 128))
  init = jax.jit(memory.adamw_8bit(1e-3).init).lower(params).compile()
  # Both moments are read for the scales of their blocks.
  reductions = init.as_text().count(" reduce(")
  assert reductions >= 2


def test_a_checkpoint_restores_the_state(tmp_path):
  ocp = pytest.importorskip("orbax.checkpoint")
  tx = compress_state(optax.lion(1e-2), memory_kind="pinned_host")
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


FACTORED = optax.adafactor(1e-2, min_dim_size_to_factor=60, momentum=0.9)


@pytest.mark.parametrize("tx", [optax.adam(1e-2), FACTORED], ids=["adam", ""])
def test_parameters_move_as_with_plain_state(tx):
  both = tx, compress_state(tx, min_leaf_size=60)
  plain, found = (train(tx, steps=20)[0]["kernel"] for tx in both)
  moved = np.linalg.norm(plain - PARAMS["kernel"])
  assert 0 < np.linalg.norm(found - plain) < 0.06 * moved


@pytest.mark.parametrize(
  ("make", "match"),
  [
    (
      lambda tx: compress_state(tx, second=OF_TREES),
      "`second` must be a codec",
    ),
    (
      lambda tx: compress_state(tx, first=codecs.feedback(SIGN)),
      "`first` .* without state",
    ),
    (
      lambda tx: compress_state(tx, rules=[("mu/kernle", None)]),
      "'mu/kernle', which matches none of",
    ),
    (lambda tx: compress_state(optax.adadelta(1e-2)), "got.*'1/e_g/bias'"),
    (
      lambda tx: compress_state(compress_state(tx)),
      "`tx` must have no encoded state",
    ),
  ],
)
def test_codecs_rules_or_states_without_effect_are_refused(make, match):
  with pytest.raises((TypeError, ValueError), match=match):
    jax.eval_shape(make(optax.adam(1e-2)).init, PARAMS)
  # An optimizer without state has nothing to encode.
  jax.eval_shape(compress_state(optax.sgd(1e-2)).init, PARAMS)


def encoded_codecs(tx, params):
  """Returns the codec of each encoded leaf, by its path."""
  state = jax.eval_shape(tx.init, params).inner
  leaves = jax.tree.leaves_with_path(state, is_leaf=is_encoded)
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): x.codec
    for path, x in leaves
    if is_encoded(x)
  }


def test_accumulators_are_encoded_but_no_v_of_another_optimizer():
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

  class Signed(NamedTuple):
    mu: Any
    v: Any

  tx = optax.GradientTransformation(
    lambda params: Signed(params, params),
    lambda updates, state, params=None: (updates, state),
  )
  params = {"kernel": jnp.ones((64, 64))}
  assert set(encoded_codecs(compress_state(tx), params)) == {"mu/kernel"}


def test_adamw_8bit_is_adamw_with_the_defaults_of_its_model():
  params = {"w": jnp.ones((512, 256)), "b": jnp.ones(4095)}
  state = jax.eval_shape(memory.adamw_8bit().init, params)
  encoded = [state.inner[0].mu["w"], state.inner[0].nu["w"]]
  assert [x.codec.block for x in encoded] == [256, 256]
  expected = [wire.payload_bytes(x.codec, params["w"]) for x in encoded]
  assert [nbytes(x) for x in encoded] == expected
  assert nbytes(state) == sum(expected) + 2 * 4 * 4095 + 4 + 4
  assert 2 * params["w"].nbytes / sum(expected) > 3.9
  exact = memory.adamw_8bit(min_leaf_size=512 * 256 + 1)
  state = jax.jit(exact.init)(params)
  updates, _ = jax.jit(exact.update)(params, state, params)
  np.testing.assert_allclose(updates["w"][0, 0], -1e-3 * 1.01, rtol=1e-5)
