"""Exchanges between hosts whose devices exchange first."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jaxmotion
from jaxmotion import codecs, wire
from jaxmotion.testing import check_transform
from tests.transforms import helpers
from tests.transforms.helpers import assert_close, bits

HOSTS, DEVICES = 2, 2
WORKERS = HOSTS * DEVICES
AXES = jaxmotion.HostAxes("host", "device")
BOTH = AXES.names
MESH = Mesh(np.array(jax.devices()[:WORKERS]).reshape(HOSTS, DEVICES), BOTH)
RNG = np.random.default_rng(0)
PARAMS = {
  "kernel": jnp.asarray(RNG.normal(size=(16, 32)).astype(np.float32)),
  "bias": jnp.zeros(32),
}
BATCH = (
  jnp.asarray(RNG.normal(size=(WORKERS * 8, 16)).astype(np.float32)),
  jnp.asarray(RNG.normal(size=(WORKERS * 8, 32)).astype(np.float32)),
)
INT4 = codecs.feedback(codecs.uniform(bits=4, rounding="stochastic"))


def loss_fn(params, batch):
  x, y = batch
  h = jnp.tanh(x @ params["kernel"] + params["bias"][None])
  return jnp.mean((h - y) ** 2)


def train(tx, steps=4, batch=BATCH, **extra):
  return helpers.train(
    loss_fn, tx, MESH, PARAMS, batch, axis_name=AXES, steps=steps, **extra
  )


def exchange(codec=None, **options):
  return jaxmotion.exchange(AXES, codec, **options)


def chain(codec=None, **options):
  return optax.chain(exchange(codec, **options), optax.sgd(0.1))


@pytest.mark.parametrize(
  "tx",
  [
    chain(codecs.sign(), local_codec=codecs.cast("bfloat16")),
    jaxmotion.skip_nonfinite(
      optax.chain(
        exchange(
          codecs.rules([("bias", codecs.identity()), ("kernel", INT4)]),
          method="two_phase",
          nonfinite="skip",
        ),
        optax.lion(1e-3),
      ),
      AXES,
    ),
  ],
  ids=["local_codec", "skip_rules_two_phase"],
)
def test_properties_hold_over_both_axes(tx):
  check_transform(tx, MESH, PARAMS, axis_name=AXES)


def test_identity_trains_as_the_flat_exchange_does():
  ours, _, losses = train(chain())
  flat, _, theirs = train(optax.chain(jaxmotion.exchange(BOTH), optax.sgd(0.1)))
  # Four gradients of at most 1 are added in another order at each step.
  eps = np.finfo(np.float32).eps
  assert_close(ours, flat, rtol=0, atol=4 * 2 * WORKERS * eps)
  np.testing.assert_allclose(losses, theirs, rtol=1e-6)


def test_one_value_names_the_workers_of_every_function():
  chain = optax.chain(
    jaxmotion.per_worker(optax.trace(0.5), AXES), exchange(), optax.sgd(0.1)
  )
  tx = jaxmotion.skip_nonfinite(chain, AXES)
  bound = jaxmotion.bind_mesh(tx, MESH, axis_name=AXES)

  @jaxmotion.parallelize_step(MESH, axis_name=AXES)
  def step(params, opt_state, batch):
    grad_fn = jaxmotion.local_value_and_grad(loss_fn, AXES)
    loss, grads = grad_fn(params, batch)
    updates, opt_state = bound.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  params, state = PARAMS, bound.init(PARAMS)
  for _ in range(2):
    params, state, _ = step(params, state, BATCH)
  expected, held, _ = train(tx, steps=2)
  assert jaxmotion.state_specs(state, AXES) == jaxmotion.state_specs(held, BOTH)
  assert_close((params, state), (expected, held), rtol=0, atol=1e-6)


def test_error_memory_is_each_workers_own_shard():
  _, state, _ = train(chain(INT4), steps=1)
  bias, kernel = (s.first.memory.value for s in state[0].codec_state.value)
  assert kernel.shape == (WORKERS, 16 // DEVICES, 32)
  assert bias.shape == (WORKERS, 32)
  assert kernel.sharding.spec == P(BOTH)
  assert len(set(bits(list(np.asarray(kernel))))) == WORKERS


def test_hosts_exchange_words_alone_and_little_else_in_full():
  codec = codecs.rules([(".*", codecs.uniform(bits=8, block=32))])
  programs = []
  for tx in (
    exchange(codec, method="gather"),
    jaxmotion.exchange(BOTH, codec, method="gather"),
  ):
    chain = optax.chain(tx, optax.sgd(0.1))
    init, step = jaxmotion.make_train_step(loss_fn, chain, MESH, axis_name=AXES)
    state = init(PARAMS)
    programs.append(wire.step_bytes(step, state, BATCH))
    compiled = step.lower(state, BATCH).compile()
    total = wire.compiled_bytes(compiled).total_bytes
    assert total == programs[-1].total_bytes
  ours, flat = programs
  (kernel, bias), loss = (4 * (128 + 16), 4 * (8 + 1)), 4
  host = ours.select(axes=("host",))
  assert {m.dtype for m in host.moves} == {"uint32"}
  assert host.total_bytes == (HOSTS - 1) * (kernel / DEVICES + bias)
  both = flat.select(axes=BOTH)
  assert both.total_bytes == (WORKERS - 1) * (kernel + bias) + 2 * 0.75 * loss
  assert ours.select(axes=BOTH).total_bytes == 2 * 0.75 * loss


@pytest.mark.parametrize("axes", [AXES, BOTH], ids=["hosts", "flat"])
def test_weights_make_the_mean_exact_for_uneven_shares(axes):
  weights = jnp.array([1.0, 2.0, 3.0, 4.0])
  grads = jnp.asarray(RNG.normal(size=(WORKERS, 256)).astype(np.float32))
  tx = jaxmotion.exchange(axes)

  def update(grads, weights):
    mean, _ = tx.update(grads[0], tx.init(grads[0]), weight=weights[0])
    return mean

  mean = jax.jit(
    jax.shard_map(update, mesh=MESH, in_specs=(P(BOTH), P(BOTH)), out_specs=P())
  )(grads, weights)
  np.testing.assert_allclose(mean, (weights / 10) @ grads, atol=1e-6)


@pytest.mark.parametrize(
  ("worker", "policy"),
  [(3, "skip"), (1, "zero"), (2, "propagate")],
)
def test_all_workers_agree_on_a_nonfinite_gradient_of_one(worker, policy):
  x = BATCH[0].at[8 * worker].set(jnp.nan)
  tx = optax.chain(exchange(INT4, nonfinite=policy), optax.sgd(0.1))
  params, state, _ = train(tx, steps=1, batch=(x, BATCH[1]))
  shards = params["kernel"].addressable_shards
  copies = {np.asarray(shard.data).tobytes() for shard in shards}
  assert len(copies) == 1
  finite = bool(jnp.isfinite(params["kernel"]).all())
  skipped = int(state[0].skipped)
  if policy == "skip":
    assert skipped == 1
    assert bits(params) == bits(PARAMS)
    fresh = train(tx, steps=0)[1]
    assert bits(state[0].codec_state) == bits(fresh[0].codec_state)
  else:
    assert skipped == 0
    assert finite == (policy == "zero")


def test_a_level_trains_as_its_codec_does():
  levels = [codecs.feedback(codecs.uniform(bits=b, block=32)) for b in (2, 8)]
  _, _, losses = train(chain(levels), steps=2, level=jnp.int32(1))
  single = train(chain(levels[1]), steps=2)
  np.testing.assert_allclose(losses, single[2], rtol=1e-6)


def test_a_codec_within_a_host_needs_hosts():
  message = "`local_codec` must be None without hosts, got feedback.*HostAxes"
  with pytest.raises(ValueError, match=message):
    jaxmotion.exchange(BOTH, local_codec=INT4)
