"""Sharded weights that are gathered for use, on real (emulated) workers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmotion import codecs, make_key, wire
from jaxmotion.collectives import unshard
from jaxmotion.collectives.extend import PACKED_WEIGHTS
from tests.collectives.helpers import run
from tests.meshes import mesh_of

WORKERS, LAYERS, WIDTH = 4, 3, 32
RNG = np.random.default_rng(0)
WEIGHTS = RNG.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / 6
X, Y = RNG.normal(size=(2, WORKERS * 8, WIDTH)).astype(np.float32)
INT8, INT4 = codecs.uniform(bits=8), codecs.uniform(bits=4)
POLICIES = {
  "saved": None,
  "gathered again": jax.checkpoint_policies.nothing_saveable,
  "packed": jax.checkpoint_policies.save_only_these_names(PACKED_WEIGHTS),
}


def own_loss(weights, errors, batch, codec_pair, policy):
  """A worker's mean over its batch of a network whose layers are scanned."""

  def layer(x, own):
    part, error = own
    return jnp.tanh(x @ unshard(part, "data", *codec_pair, error=error)), None

  layer = layer if policy is None else jax.checkpoint(layer, policy=policy)
  return jnp.mean(
    (lax.scan(layer, batch[0], (weights, errors))[0] - batch[1]) ** 2
  )


def exact_loss(weights):
  x = X
  for w in weights:
    x = jnp.tanh(x @ w)
  return jnp.mean((x - Y) ** 2)


@functools.cache
def program(codec_pair, policy, memory=False):
  """Compiled (weights, memory) -> (gradient, new memory)."""

  def step(parts, errors, x, y):
    own = errors[0] if memory else None
    grads, change = jax.grad(own_loss, argnums=(0, 1))(
      parts, own, (x, y), codec_pair, POLICIES[policy]
    )
    return grads, errors + change[None] if memory else errors

  parts, split = P(None, "data"), P("data")
  mapped = jax.shard_map(
    step,
    mesh=mesh_of(WORKERS),
    in_specs=(parts, split, split, split),
    out_specs=(parts, split),
  )
  errors = np.zeros((WORKERS, *WEIGHTS.shape), np.float32)
  lowered = jax.jit(mapped).lower(WEIGHTS, errors, X, Y)
  return lowered.compile(), wire.step_bytes(mapped, WEIGHTS, errors, X, Y)


def test_without_codecs_the_gradient_is_that_of_whole_weights():
  zeros = np.zeros((WORKERS, *WEIGHTS.shape), np.float32)
  found, _ = program((None, None), "gathered again")[0](WEIGHTS, zeros, X, Y)
  expected = jax.jit(jax.grad(exact_loss))(WEIGHTS)
  np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_bytes_are_those_predicted_traced_and_compiled(policy):
  compiled, traced = program((INT8, INT4), policy)
  part = jnp.zeros((WIDTH // WORKERS, WIDTH))
  gathers = 2 if policy == "gathered again" else 1
  layer = gathers * wire.payload_bytes(INT8, part)
  layer += wire.payload_bytes(INT4, part)
  predicted = (WORKERS - 1) * LAYERS * layer
  assert traced.total_bytes == predicted
  assert wire.compiled_bytes(compiled).total_bytes == predicted
  # In float32 with weights gathered again: three times 4 bytes.
  fp32 = 3 * (WORKERS - 1) / WORKERS * WEIGHTS.nbytes
  assert fp32 / predicted > (4.7 if policy == "gathered again" else 7.8)


def test_memory_that_gathers_again_has_no_layers_weights():
  saved, again, packed = (
    program((INT8, INT4), policy)[0].memory_analysis().temp_size_in_bytes
    for policy in POLICIES
  )
  assert again < packed < saved
  assert saved - again > 0.8 * (LAYERS - 1) * WEIGHTS[0].nbytes


def test_what_was_sent_and_what_is_remembered_is_what_came_in():
  compiled, _ = program((INT8, INT4), "gathered again", memory=True)
  exact, _ = program((INT8, None), "gathered again")
  errors = np.zeros((WORKERS, *WEIGHTS.shape), np.float32)
  wanted, _ = exact(WEIGHTS, errors, X, Y)
  sent, most = np.zeros_like(WEIGHTS), []
  for _ in range(3):
    grads, errors = compiled(WEIGHTS, errors, X, Y)
    sent += np.asarray(grads)
    most.append(np.abs(errors).max())
  # What is remembered is sent, so that it does not grow.
  assert 0 < most[2] < 2 * most[0]
  np.testing.assert_allclose(
    sent + np.asarray(errors).mean(0), 3 * np.asarray(wanted), atol=1e-6
  )


def test_weights_that_are_tied_or_unused_keep_the_law():
  error = RNG.normal(size=(2, 2, 8, 6)).astype(np.float32) / 10
  part = RNG.normal(size=(2, 2, 8, 3)).astype(np.float32)

  def changes(own):
    part, error = own

    def loss(part, error):
      tied, _unused = (
        unshard(p, "data", INT8, INT4, axis=1, error=e)
        for p, e in zip(part, error, strict=True)
      )
      again = unshard(part[0], "data", INT8, INT4, axis=-1, error=error[0])
      return jnp.sum(tied**2) + jnp.sum(again**3)

    grads, change = jax.grad(loss, argnums=(0, 1))(part, error)
    whole = unshard(part[0], "data", INT8, axis=1)
    own = 2 * whole + 3 * whole**2
    left = lax.pmean(own - change[0], "data")
    return left, lax.all_gather(grads, "data", to="invarying"), change[1]

  left, grads, unused = run(changes, (part, error), 2, (P(), P(), P("data")))
  # Two uses read the memory twice, so what was sent has it twice.
  sent = np.concatenate([grads[0, 0], grads[1, 0]], axis=1)
  np.testing.assert_allclose(sent, left, atol=1e-5)
  assert not np.any(unused)


def test_all_workers_hold_the_same_bits_with_random_rounding():
  codec = codecs.uniform(bits=4, rounding="stochastic")
  part = RNG.normal(size=(3, 4, 5)).astype(np.float32)

  def whole(part):
    key = make_key(0, lax.axis_index("data"))
    return unshard(part, "data", codec, key=key)[None]

  found = np.asarray(run(whole, part, 3, P("data")))
  assert found.shape == (3, 12, 5)
  assert len({w.tobytes() for w in found}) == 1
  assert np.abs(found[0] - part.reshape(12, 5)).max() < np.abs(part).max() / 7


def test_wrong_uses_say_what_is_wrong():
  part = np.zeros((2, 4, 4), np.float32)
  memory = codecs.feedback(INT4)
  with pytest.raises(ValueError, match="`gradient_codec` must be .* state"):
    run(lambda p: unshard(p, "data", INT8, memory), part, 2)
  with pytest.raises(ValueError, match=r"`error` must have the shape \(8, 4\)"):
    run(lambda p: unshard(p, "data", error=p), part, 2)
