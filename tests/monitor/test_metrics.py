"""Metrics of optimizer states: bytes, errors and skipped steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxmotion
from jaxmotion import codecs, presets, transforms, wire
from tests.meshes import mesh_of

PARAMS = {"b": np.zeros(40, np.float32), "w": np.ones((64, 48), np.float32)}
BATCH = {
  "x": jax.ShapeDtypeStruct((8, 64), "float32"),
  "y": jax.ShapeDtypeStruct((8, 48), "float32"),
}
INT4 = codecs.feedback(codecs.uniform(bits=4))
TOPK = codecs.feedback(codecs.topk(density=0.02))


MESH = mesh_of(4)


def loss_fn(params, batch):
  y = jnp.tanh(batch["x"] @ params["w"]) - batch["y"]
  return jnp.mean(y**2) + jnp.mean(params["b"])


def chain_of(codec, axis_name="data", **options):
  return optax.chain(
    jaxmotion.exchange(axis_name, codec, **options), optax.adam(1e-3)
  )


def fill_state(init, seed=0):
  """An `opt_state` with numbers in it, and nothing that was encoded."""
  state = jax.eval_shape(init, PARAMS).opt_state
  rng = np.random.default_rng(seed)

  def fill(a):
    if jnp.issubdtype(a.dtype, jnp.floating):
      return jnp.asarray(rng.normal(size=a.shape), a.dtype)
    return jnp.zeros(a.shape, a.dtype)

  return jax.tree.map(fill, state)


EXCHANGES = {
  "none": chain_of(None),
  "gather": chain_of(codecs.sign(), method="gather"),
  "buckets": chain_of(codecs.buckets(TOPK, max_leaf_size=64)),
  "sharded": jaxmotion.sharded(
    "data",
    optax.adam(1e-3),
    gradient_codec=INT4,
    weight_codec=codecs.uniform(bits=8),
  ),
  "two": optax.partition(
    {"one": chain_of(INT4), "other": chain_of(TOPK)},
    {"b": "one", "w": "other"},
  ),
  "power_sgd": optax.chain(
    presets.power_sgd("data", start=0), optax.sgd(0.1, momentum=0.9)
  ),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_wire_bytes_are_those_of_the_traced_step(name):
  tx = EXCHANGES[name]
  init, step = jaxmotion.make_train_step(loss_fn, tx, MESH, mean_loss=False)
  found = jaxmotion.metrics(fill_state(init), mesh=MESH)
  ledger = wire.step_bytes(step, jax.eval_shape(init, PARAMS), BATCH)
  assert found["exchange/wire_bytes"] == pytest.approx(ledger.total_bytes)
  plain = 2 * 3 / 4 * 4 * (40 + 64 * 48)
  # Whole small leaves of `sharded` travel as in an all-reduce.
  assert found["exchange/ratio"] * ledger.total_bytes == pytest.approx(plain)
  bits = 32 / found["exchange/ratio"]
  assert found["exchange/bits_per_element"] == pytest.approx(bits)


def test_levels_choose_the_bytes_in_a_jitted_function():
  pair = [codecs.feedback(codecs.uniform(bits=n)) for n in (4, 8)]
  tx = chain_of(pair)
  state = fill_state(jaxmotion.make_train_step(loss_fn, tx, MESH)[0])
  read = jax.jit(lambda state, n: jaxmotion.metrics(state, level=n))
  low, high = read(state, 0), read(state, 1)
  assert 7 < float(low["exchange/ratio"]) < 8
  assert 3.5 < float(high["exchange/ratio"]) < 4
  assert int(high["exchange/level"]) == 1
  # Nobody said which codec was used.
  assert "exchange/wire_bytes" not in jaxmotion.metrics(state)
  with pytest.raises(ValueError, match=r"`level` must be in \[0, 2\), got 2"):
    jaxmotion.metrics(state, level=2)


def constant_loss(params, batch):
  """A loss whose gradient is the batch."""
  return jnp.sum(params["w"] * batch.mean(0))


@functools.cache
def train_constantly():
  """(state, error of the only worker with a gradient, mesh)."""
  exchange = jaxmotion.exchange("data", TOPK, method="gather")
  tx = jaxmotion.skip_nonfinite(optax.chain(exchange, optax.sgd(1.0)), "data")
  mesh = mesh_of(2)
  init, step = jaxmotion.make_train_step(constant_loss, tx, mesh)
  state = init({"w": jnp.zeros(100)})
  g = np.random.default_rng(0).normal(size=100).astype(np.float32)
  batch = np.stack([g, np.zeros_like(g)])
  for scale in np.float32([1, 1, 1, np.nan]):
    state, _ = step(state, batch * scale)
  error = 3 * g + 2 * np.asarray(state.params["w"])  # What was not applied yet.
  return state.opt_state, error, mesh


def test_norms_are_of_what_is_still_to_be_sent_and_skips_count_once():
  state, error, _ = train_constantly()
  found = jaxmotion.metrics(state)
  norm = np.linalg.norm(error)
  assert norm > 1
  # The other worker has no error.
  assert found["exchange/error_norm_max"] == pytest.approx(norm, rel=1e-5)
  mean = norm / np.sqrt(2)
  assert found["exchange/error_norm"] == pytest.approx(mean, rel=1e-5)
  names = ["step", "exchange/updates", "exchange/skipped"]
  assert [int(found[name]) for name in names] == [3, 3, 1]
  assert "exchange/ratio" in found
  jitted = jax.jit(jaxmotion.metrics)(state)
  assert set(jitted) == set(found)
  for name, value in found.items():
    assert float(jitted[name]) == pytest.approx(float(value)), name
    assert jnp.shape(value) == ()


def test_a_worker_reads_its_own_error_inside_of_a_map():
  state, error, mesh = train_constantly()

  @jax.jit
  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(jaxmotion.state_specs(state, "data"),),
    out_specs=P("data"),
    check_vma=False,
  )
  def read(state):
    return jaxmotion.metrics(state)["exchange/error_norm"][None]

  np.testing.assert_allclose(
    read(state), [np.linalg.norm(error), 0], rtol=1e-5, atol=1e-6
  )


def gathered_loss(params, batch):
  return loss_fn(
    {k: transforms.gather_params(v) for k, v in params.items()}, batch
  )


def test_fully_sharded_states_have_error_norms_and_counted_bytes():
  init, step = jaxmotion.make_train_step(
    gathered_loss,
    jaxmotion.fully_sharded(
      optax.adam(1e-3),
      gradient_codec=codecs.uniform(bits=4),
      error_feedback=True,
    ),
    MESH,
  )
  state = fill_state(init)
  found = jaxmotion.metrics(state)
  rows = sum(
    np.square(np.asarray(e)).reshape(4, -1).sum(1) for e in state.error.value
  )
  assert found["exchange/error_norm"] == pytest.approx(np.sqrt(rows.mean()))
  assert "exchange/wire_bytes" not in found
  sent = wire.step_bytes(step, jax.eval_shape(init, PARAMS), BATCH)
  found = jaxmotion.metrics(state, sent=sent)
  weights = 3 / 4 * 4 * (64 * 48 + 40)  # Gathered once, by 4 workers.
  gradient = found["exchange/wire_bytes"] - weights
  assert weights / 8 < gradient < weights / 6
  assert found["exchange/error_norm"] > 0 and "exchange/ratio" not in found
  with pytest.raises(TypeError, match=r"`sent` must be what .*got 3"):
    jaxmotion.metrics(state, sent=3)


def test_local_updates_count_steps_and_send_all_fragments():
  codec = codecs.rules([("w", INT4), ("b", codecs.uniform(bits=8))])
  init, _ = jaxmotion.make_train_step(
    loss_fn,
    jaxmotion.local_updates(
      optax.sgd(0.1), chain_of(codec), every=4, fragments=2
    ),
    MESH,
  )
  state = fill_state(init)
  outer = state.outer[0][0]._replace(count=jnp.int32(2))
  state = state._replace(
    count=jnp.int32(9), outer=((outer, *state.outer[0][1:]), state.outer[1])
  )
  found = jaxmotion.metrics(state, mesh=MESH)
  assert (found["step"], found["exchange/updates"]) == (9, 2)
  state = transforms.bind_mesh(chain_of(codec), MESH).init(PARAMS)
  all_at_once = jaxmotion.metrics(state)
  # A fragment of one small leaf has padding of its own.
  ratio = found["exchange/wire_bytes"] / all_at_once["exchange/wire_bytes"]
  assert 1 <= ratio < 1.1


@pytest.mark.parametrize(
  "wrap",
  [
    lambda tx: optax.masked(tx, {"b": False, "w": True}),
    lambda tx: optax.chain(transforms.per_worker(optax.trace(0.9), "data"), tx),
    jaxmotion.delayed,
  ],
)
def test_exchanges_are_found_wherever_they_are(wrap):
  init, _ = jaxmotion.make_train_step(loss_fn, wrap(chain_of(INT4)), MESH)
  state = jax.eval_shape(init, PARAMS).opt_state
  found = jax.eval_shape(lambda s: jaxmotion.metrics(s, mesh=MESH), state)
  assert {"exchange/ratio", "exchange/error_norm"} <= set(found)


def test_a_state_says_how_many_workers_there_are_or_asks_for_the_mesh():
  axes = jaxmotion.HostAxes("host", "device")
  mesh = mesh_of(2, 4, names=axes.names)
  tx = chain_of(INT4, axes)
  state = transforms.bind_mesh(tx, mesh, axis_name=axes).init(PARAMS)
  found = jaxmotion.metrics(state)
  # A device sends its quarter of the matrix, and whole what is too small.
  assert 7 < found["exchange/ratio"] < 8
  assert found["exchange/wire_bytes"] < (64 * 48 / 4 / 2 + 40) * 1.2
  host = jax.device_get(state)
  counts = {"step", "exchange/updates", "exchange/skipped"}
  # Eight rows are those of hosts and devices.
  assert set(jaxmotion.metrics(host)) == counts
  assert jaxmotion.metrics(host, mesh=mesh) == found
  with pytest.raises(ValueError, match=r"\['device', 'host'\], got .*'device'"):
    jaxmotion.metrics(host, mesh=mesh_of(2, names=("host",)))
  # Rows of error memory count the workers; without memory nothing does.
  for codec, names in ((INT4, {"exchange/ratio"}), (codecs.sign(), set())):
    state = transforms.bind_mesh(chain_of(codec), MESH).init(PARAMS)
    assert "exchange/ratio" in jaxmotion.metrics(state)
    found = jaxmotion.metrics(jax.device_get(state))
    assert {"exchange/ratio"} & set(found) == names


def test_a_step_reads_its_metrics_beside_the_axes_of_a_model():
  names = ("data", "model")
  mesh = mesh_of(2, 2, names=names)
  specs = {"b": P(), "w": P(None, "model")}
  tx = chain_of(INT4)
  state = transforms.bind_mesh(tx, mesh, specs=specs).init(PARAMS)
  found = jaxmotion.metrics(state)
  inner = jax.jit(
    jax.shard_map(
      lambda s: jax.lax.pmean(jaxmotion.metrics(s)["exchange/ratio"], "data"),
      mesh=mesh,
      in_specs=(jaxmotion.state_specs(state, names),),
      out_specs=P(),
      check_vma=False,
    )
  )(state)
  assert float(inner) == pytest.approx(float(found["exchange/ratio"]))
  assert jaxmotion.metrics(jax.device_get(state), mesh=mesh) == found
