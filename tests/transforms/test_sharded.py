"""Optimizers whose state is sharded over real (emulated) workers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxmotion
from jaxmotion import checkpoint, codecs, transforms, wire
from jaxmotion.core import to_varying
from jaxmotion.testing import check_transform
from jaxmotion.transforms._shard_layout import find_across
from tests.meshes import mesh_of
from tests.transforms.helpers import bits

STEPS = 3
PARAMS = {  # Of 3 workers: padded, padded, cut, whole.
  "conv": np.float32(np.linspace(-1, 1, 3 * 3 * 4 * 16)).reshape(3, 3, 4, 16),
  "dense": np.float32(np.linspace(-2, 2, 32 * 20)).reshape(32, 20),
  "long": np.zeros(300, np.float32),
  "scale": np.ones(5, np.float32),
}
INT4 = codecs.uniform(bits=4, block=128)


def gradients(workers, steps=STEPS):
  """Each worker's own, far from equal: (steps, workers, ...)."""
  generator = np.random.default_rng(workers)
  return jax.tree.map(
    lambda a: np.float32(generator.normal(size=(steps, workers, *a.shape))),
    PARAMS,
  )


def train(tx, params, grads):
  """Updates parameters in a loop of one's own, inside `shard_map`."""

  def update(carry, own):
    params, state = carry
    updates, state = tx.update(own, state, params)
    return (optax.apply_updates(params, updates), state), None

  own = jax.tree.map(lambda g: g[:, 0], grads)
  return lax.scan(update, (params, tx.init(params)), own)[0]


def trained(workers, txs):
  """Parameters after the same gradients, one program for all of `txs`."""

  def program(params, grads):
    return {name: train(tx, params, grads)[0] for name, tx in txs.items()}

  mapped = jax.shard_map(
    program,
    mesh=mesh_of(workers),
    in_specs=(P(), P(None, "data")),
    out_specs=P(),
  )
  return jax.jit(mapped)(PARAMS, gradients(workers))


def clipped(clip):
  return optax.chain(clip, optax.sgd(0.1, momentum=0.9, nesterov=True))


ADAMW = optax.adamw(1e-2, weight_decay=0.1)
SHARD_CLIP = transforms.clip_by_global_norm(0.5, "data")
ALONE = {
  "adamw": ADAMW,
  "lion": optax.lion(1e-2),
  # Powers of two are multiplied without rounding, however XLA fuses them.
  "halves": optax.sgd(0.125, momentum=0.5),
  "clip": clipped(optax.clip_by_global_norm(0.5)),
}
SHARDED = {
  **{name: jaxmotion.sharded("data", ALONE[name]) for name in ALONE},
  "clip": jaxmotion.sharded("data", clipped(SHARD_CLIP)),
  "master": jaxmotion.sharded("data", ADAMW, weight_codec=codecs.identity()),
}


@pytest.mark.parametrize(
  ("workers", "names"), [(4, tuple(ALONE)), (3, ("adamw",))]
)
def test_it_makes_the_updates_of_the_optimizer_on_every_worker(workers, names):
  exchange = jaxmotion.exchange("data")
  txs = {name: optax.chain(exchange, ALONE[name]) for name in names}
  ours = {f"sharded {n}": SHARDED[n] for n in (*names, "master")}
  found = trained(workers, txs | ours)
  for name in (*names, "master"):
    alone = found["adamw" if name == "master" else name]
    for leaf in PARAMS:
      np.testing.assert_allclose(
        found[f"sharded {name}"][leaf], alone[leaf], rtol=2e-6, atol=1e-6
      )
  if "halves" in names:
    assert bits(found["sharded halves"]) == bits(found["halves"])


def test_it_keeps_the_properties_of_a_transform():
  axes = jaxmotion.HostAxes("host", "device")
  tx = jaxmotion.sharded(
    axes,
    optax.inject_hyperparams(optax.adamw)(1e-2),
    gradient_codec=codecs.feedback(
      codecs.uniform(bits=4, rounding="stochastic")
    ),
    weight_codec=INT4,
    nonfinite="skip",
    local_codec=codecs.uniform(bits=8, block=64),
  )
  mesh = mesh_of(2, 2, names=axes.names)
  params = {"w": jnp.ones((16, 32)), "b": jnp.ones(7)}
  check_transform(tx, mesh, params, axis_name=axes)


def test_two_hops_make_the_same_mean_and_cross_hosts_once():
  axes = jaxmotion.HostAxes("host", "device")
  mesh = mesh_of(3, 2, names=axes.names)
  params = {"w": np.float32(np.linspace(-1, 1, 48 * 24)).reshape(48, 24)}
  clip = transforms.clip_by_global_norm(0.5, axes)
  tx = jaxmotion.sharded(
    axes,
    clipped(clip),
    weight_codec=codecs.identity(),
    local_codec=codecs.truncate(bytes=4),  # Loses nothing.
  )
  alone = clipped(optax.clip_by_global_norm(0.5))
  grads = np.random.default_rng(0).normal(size=(6, 48, 24)).astype(np.float32)

  def program(params, grads):
    held, state = params, tx.init(params)
    for _ in range(2):
      updates, state = tx.update({"w": grads[0]}, state, held)
      held = optax.apply_updates(held, updates)
    return held

  mapped = jax.shard_map(
    program, mesh=mesh, in_specs=(P(), P(axes.names)), out_specs=P()
  )
  expected, state = params, alone.init(params)
  for _ in range(2):
    updates, state = alone.update({"w": grads.mean(0)}, state, expected)
    expected = optax.apply_updates(expected, updates)
  found = jax.jit(mapped)(params, grads)
  np.testing.assert_allclose(found["w"], expected["w"], atol=1e-6)
  sent = wire.step_bytes(mapped, params, grads).per_axis()
  # Of 2 steps: gradients and weights, of the half that a device sends.
  assert sent["host",] == 2 * 2 * (2 / 3) * params["w"].nbytes / 2


def update_shape(tx, init=None):
  """Traces `init` and `update` on 2 workers; nothing is compiled."""

  def program(params):
    state = (init or tx.init)(params)
    return tx.update(to_varying(params, "data"), state, params)[0]

  mapped = jax.shard_map(program, mesh=mesh_of(2), in_specs=P(), out_specs=P())
  return jax.eval_shape(mapped, PARAMS)


ACROSS = {
  "clip first": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
  "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8),
  "muon": optax.contrib.muon(1e-3),
  "if finite": optax.apply_if_finite(optax.adam(1e-3), 3),
}


@pytest.mark.parametrize("name", ACROSS)
def test_optimizers_that_look_across_a_leaf_are_refused(name):
  with pytest.raises(ValueError, match="`tx` must treat every element"):
    update_shape(jaxmotion.sharded("data", ACROSS[name]))


BY_ELEMENT = {
  "injected": optax.inject_hyperparams(optax.adamw)(1e-3),
  "masked": optax.chain(
    optax.adam(1e-3),
    optax.masked(
      optax.add_decayed_weights(0.1),
      lambda tree: jax.tree.map(lambda a: a.ndim > 1, tree),
    ),
  ),
  "two": optax.multi_transform(
    {"a": optax.adam(1e-3), "b": optax.sgd(0.1, momentum=0.9)},
    dict(conv="a", dense="b", long="a", scale="b"),
  ),
  "schedule free": optax.contrib.schedule_free_adamw(1e-3),
  "accumulated": optax.MultiSteps(optax.adam(1e-3), 2),
}


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_optimizers_that_treat_elements_by_themselves_are_taken(name):
  tx = jaxmotion.sharded("data", BY_ELEMENT[name], weight_codec=INT4)
  update_shape(tx)


def test_it_may_not_be_inside_of_what_runs_it_at_some_steps():
  tx = optax.MultiSteps(jaxmotion.sharded("data", optax.adam(1e-3)), 2)
  tx = tx.gradient_transformation()
  init, _ = jaxmotion.make_train_step(jnp.sum, tx, mesh_of(2))
  describe = lambda params: checkpoint.describe_state(tx, params, mesh_of(2))
  for make in (init, describe):
    with pytest.raises(ValueError, match="`tx` must have no exchange inside"):
      jax.eval_shape(make, PARAMS)


def test_wrong_uses_say_what_is_wrong():
  memory, adam = codecs.feedback(INT4), optax.adam(1e-3)
  joined = codecs.buckets(INT4, max_leaf_size=10**6)
  for options, message in (
    (dict(weight_codec=memory), "`weight_codec` must be .* state"),
    (
      dict(gradient_codec=codecs.feedback(INT4, form="global")),
      "`gradient_codec` must have .* local",
    ),
    (dict(gradient_codec=joined), "`gradient_codec` must encode every"),
  ):
    with pytest.raises(ValueError, match=message):
      update_shape(jaxmotion.sharded("data", adam, **options))
  tx = jaxmotion.sharded("data", adam, weight_codec=INT4)
  with pytest.raises(ValueError, match="`params` must be given"):
    update_shape(tx._replace(update=lambda g, s, p: tx.update(g, s)))
  message = "`state` must be made for the weight_codec"
  with pytest.raises(ValueError, match=message):
    update_shape(tx, jaxmotion.sharded("data", adam).init)


def test_zeros_take_the_place_of_what_is_not_finite():
  tx = jaxmotion.sharded("data", optax.sgd(1.0), nonfinite="zero")
  grads = np.ones((2, 16, 16), np.float32)
  grads[1, 3, 3] = np.nan
  params = {"w": np.ones((16, 16), np.float32)}

  def program(params, grads):
    updates, state = tx.update({"w": grads[0]}, tx.init(params), params)
    return updates["w"], state.skipped

  mapped = jax.shard_map(
    program, mesh=mesh_of(2), in_specs=(P(), P("data")), out_specs=P()
  )
  updates, skipped = jax.jit(mapped)(params, grads)
  np.testing.assert_array_equal(updates, -np.nan_to_num(grads).mean(0))
  assert int(skipped) == 0


X = jnp.ones((4, 3))
NORM = jnp.linalg.norm
COMBINING = {
  "mean": lambda x: x - x.mean(),
  "matmul": lambda x: x @ x.T,
  "sort": lambda x: jnp.sort(x, 0),
  "branch": lambda x: lax.cond(X.size, jnp.cumsum, lambda a: a, x[:, 0]),
  "branch by sum": lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
  "loop": lambda x: lax.scan(lambda c, a: (c, a / NORM(a)), 0.0, x)[1],
  # Each row is scaled by the norm of the row before.
  "loop by carry": lambda x: lax.scan(lambda c, a: (NORM(a), c * a), 1.0, x)[1],
  "loop until": lambda x: lax.while_loop(lambda a: a.sum() < 9, jnp.exp, x),
  "jitted": jax.jit(lambda x: x / x.max()),
}
APART = {
  "scaled": lambda x: 2 * jnp.sqrt(x) + x,
  "branch": lambda x: lax.cond(True, lambda a: a, lambda a: 2 * a, x),
  "loop": lambda x: lax.scan(lambda c, a: (c, 2 * a), 0.0, x)[1],
  "loop beside": lambda x: lax.while_loop(
    lambda s: s[0].sum() < 9,
    lambda s: (s[0] + s[0].sum(), 2 * s[1]),
    (jnp.ones(2), x),
  )[1],
  "unused": lambda x: (x.sum(), 2 * x)[1],
  "barrier": lambda x: lax.optimization_barrier((x.sum(), x))[1],
  "table": lambda x: jnp.arange(9.0)[x.astype(int)],
}


def test_what_combines_elements_of_a_part_is_found_and_nothing_else():
  for name, fun in COMBINING.items():
    assert find_across(fun, (X,), [True], "data"), name
    assert not find_across(fun, (X,), [False], "data"), name
  for name, fun in APART.items():
    assert not find_across(fun, (X,), [True], "data"), name


def test_a_sum_over_the_workers_is_no_parts_own():
  found = []

  def program(x):
    scaled = lambda x: x / lax.psum(x.sum(), "data")
    found.append(find_across(scaled, (x,), [True], "data"))
    return x

  jax.eval_shape(jax.vmap(program, axis_name="data"), X[None])
  assert found == [""]
