"""Islands of one process, in threads, that share a folder."""

import logging
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmotion
from jaxmotion import codecs, islands
from jaxmotion.islands import _island, _store
from tests.compilations import compilations
from tests.paths import ROOT
from tests.processes import environment

OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
CODECS = {
  "int8": codecs.uniform(bits=8),
  "int4_feedback": codecs.feedback(codecs.uniform(bits=4)),
  "topk_feedback": codecs.feedback(codecs.topk(density=0.1)),
  "buckets": codecs.buckets(codecs.feedback(codecs.uniform(bits=4))),
}


def make_params():
  rng = np.random.default_rng(0)
  shapes = {"kernel": (24, 40), "bias": (40,), "scale": ()}
  return {
    name: jnp.asarray(rng.normal(size=shape), jnp.float32)
    for name, shape in shapes.items()
  }


def make_grads(step, workers):
  """Gradients of a linear loss, so that inner steps have one rounding."""
  rng = np.random.default_rng([1, step])
  return jax.tree.map(
    lambda p: rng.normal(size=(workers, *p.shape)).astype(np.float32),
    make_params(),
  )


def loss_fn(params, batch):
  return sum(
    jnp.sum(p * g[0])
    for p, g in zip(
      jax.tree.leaves(params), jax.tree.leaves(batch), strict=True
    )
  )


def train_local(codec, workers, every, steps, fragments=1):
  """Returns the anchor of `local_updates` after each step."""
  mesh = jax.sharding.Mesh(jax.devices()[:workers], ("data",))
  exchange = jaxmotion.exchange("data", codec, method="gather")
  scheme = jaxmotion.local_updates(
    optax.sgd(0.5),
    optax.chain(exchange, OUTER),
    every=every,
    fragments=fragments,
  )
  init, step = jaxmotion.make_train_step(loss_fn, scheme, mesh)
  state, anchors = init(make_params()), []
  for i in range(steps):
    state, loss = step(state, make_grads(i, workers))
    float(loss)
    anchors.append(jax.device_get(state.params))
  return anchors


def train_island(island, index, workers, steps):
  """Returns the anchor of one island after each step."""
  inner = jax.jit(
    lambda p, g: jax.tree.map(lambda p, g: p - 0.5 * g, p, g),
    donate_argnums=0,
  )
  params, anchors = island.start(), []
  for i in range(steps):
    grads = jax.tree.map(lambda g: g[index], make_grads(i, workers))
    params = island.step(inner(params, grads))
    anchors.append(jax.device_get(island.anchor))
  return anchors


def run_all(functions):
  """Calls functions in threads; returns their results."""
  results = [None] * len(functions)

  def run(i):
    results[i] = functions[i]()

  threads = [
    threading.Thread(target=run, args=(i,)) for i in range(len(functions))
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return results


def assert_same_bits(one, other):
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(
  "name, workers, fragments",
  [
    *((name, workers, 1) for name in CODECS for workers in (2, 3)),
    *(("int4_feedback", 2, 3), ("buckets", 3, 3)),
  ],
)
def test_islands_equal_local_updates_bit_for_bit(
  name, workers, fragments, tmp_path
):
  codec, every, steps = CODECS[name], 3, 12
  expected = train_local(codec, workers, every, steps, fragments)
  members = [
    islands.join(
      tmp_path,
      make_params(),
      OUTER,
      codec=codec,
      every=every,
      fragments=fragments,
      name=f"island{i}",
      quorum=workers,
      grace_s=100.0,
    )
    for i in range(workers)
  ]
  found = run_all(
    [
      lambda i=i, one=one: train_island(one, i, workers, steps)
      for i, one in enumerate(members)
    ]
  )
  for one in members:
    assert one.round == steps // every
    one.stop()
  for anchors in found:
    assert_same_bits(anchors, expected)


def test_islands_divide_the_model_alike(tmp_path):
  options = dict(codec=CODECS["int8"], every=6)
  params = {k: jnp.zeros(4) for k in "abcd"}
  islands.join(tmp_path, params, OUTER, fragments=2, **options)
  for fragments in (1, 3):
    with pytest.raises(ValueError, match="its codec|arrays of this run"):
      islands.join(tmp_path, params, OUTER, fragments=fragments, **options)
  with pytest.raises(ValueError, match="`fragments` must divide `every`, 6"):
    islands.join(tmp_path, params, OUTER, fragments=4, **options)
  with pytest.raises(ValueError, match="`fragments` must each have a leaf"):
    islands.join(tmp_path, params, OUTER, fragments=6, **options)


def test_all_fragments_begin_again_when_one_is_not_finite(tmp_path):
  params = {k: jnp.zeros(4) for k in "ab"}
  codec, outer = codecs.identity(), optax.sgd(1.0)
  island = islands.join(
    tmp_path, params, outer, codec=codec, every=4, fragments=2
  )
  params = island.start()
  for _ in range(4):
    params = add_one(island, params)
  anchor = island.anchor
  assert [float(anchor[k][0]) for k in "ab"] == [2.0, 4.0]
  # A gradient that is not finite spoils all parameters, and one is due.
  params = island.step(jax.tree.map(lambda p: p + jnp.nan, params))
  params = island.step(jax.tree.map(lambda p: p + jnp.nan, params))
  assert_same_bits(params, anchor)
  for _ in range(4):
    params = add_one(island, params)
  assert island.round == 2
  assert np.isfinite([island.anchor[k] for k in "ab"]).all()
  island.stop()


class SlowStore(_store.Store):
  """A store whose operations take long, or fail."""

  seconds, is_away = 0.0, False

  def list(self):
    time.sleep(self.seconds)
    if self.is_away:
      raise _store.StoreError("the list: GenericError")
    return super().list()


def join_slow(monkeypatch, folder, **options):
  monkeypatch.setattr(_island._store, "Store", SlowStore)
  return islands.join(
    folder, make_params(), OUTER, codec=CODECS["int8"], every=2, **options
  )


def add_one(island, params):
  return island.step(jax.tree.map(lambda p: p + 1, params))


def test_steps_go_on_beside_a_slow_store(monkeypatch, tmp_path):
  island = join_slow(monkeypatch, tmp_path, delay=1000)
  params = island.start()
  while island.round < 2:  # All is compiled.
    params = add_one(island, params)
    time.sleep(0.01)
  island._fragments[0].follower._store.seconds = 0.5
  rounds, longest, started = set(), 0.0, time.monotonic()
  while time.monotonic() - started < 5:
    before = time.monotonic()
    params = add_one(island, params)
    rounds.add(island.round)
    longest = max(longest, time.monotonic() - before)
    time.sleep(0.01)
  island.stop()
  assert len(rounds) >= 3
  assert longest < 0.4, "a step waited for the store"


@pytest.mark.parametrize("is_committed", [False, True])
def test_nothing_is_compiled_after_the_first_round(is_committed, tmp_path):
  island = islands.join(
    tmp_path, make_params(), OUTER, codec=CODECS["int4_feedback"], every=2
  )
  inner = jax.jit(lambda tree: jax.tree.map(lambda p: p * 0.9, tree))
  params = island.start()
  if is_committed:
    params = jax.device_put(params, jax.devices()[0])
  while island.round < 1:
    params = island.step(inner(params))
  before = compilations()
  while island.round < 3:
    params = island.step(inner(params))
  island.stop()
  assert compilations() == before
  assert {p.committed for p in jax.tree.leaves(params)} == {is_committed}


def test_a_step_waits_after_its_delay_and_not_before(monkeypatch, tmp_path):
  island = join_slow(monkeypatch, tmp_path, delay=3)
  params = island.start()
  rounds = []
  for _ in range(5):
    params = add_one(island, params)
    rounds.append(island.round)
    if not island._fragments[0].follower._store.seconds:
      island._fragments[0].follower._store.seconds = 1.0
  island.stop()
  # It sends in the second step, and waits in the third one after.
  assert rounds == [0, 0, 0, 0, 1]
  # What was changed since is kept, and is the next change.
  expected = jax.tree.map(lambda a: a + 3, island.anchor)
  for a, b in zip(
    jax.tree.leaves(expected), jax.tree.leaves(params), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-6)


def test_an_island_trains_on_while_the_store_is_away(
  monkeypatch, tmp_path, caplog
):
  island = join_slow(monkeypatch, tmp_path, grace_s=60.0)
  params = add_one(island, island.start())
  store = island._fragments[0].follower._store
  for _ in range(20):
    round, store.is_away = island.round, True
    started = time.monotonic()
    for _ in range(20):
      params = add_one(island, params)
    assert time.monotonic() - started < 10, "a step waited for the store"
    assert island.round <= round + 1
    away = [r for r in caplog.records if "trains on by itself" in r.message]
    assert len(away) == 1 and away[0].levelno == logging.WARNING
    caplog.clear()
    store.is_away = False
    deadline = time.monotonic() + 30
    while island.round < round + 3:
      params = add_one(island, params)
      assert time.monotonic() < deadline
  island.stop()


UNSTOPPED = """
import sys, jax.numpy as jnp, optax
from jaxmotion import codecs, islands
codec = codecs.uniform(bits=8)
island = islands.join(
  sys.argv[1], jnp.zeros(9), optax.sgd(1.0), codec=codec, every=1, delay=1000
)
params = island.start()
for _ in range(20):
  params = island.step(params + 1)
"""


def test_a_process_that_does_not_stop_its_island_ends_without_a_crash(tmp_path):
  for _ in range(3):  # Its thread is at another place each time.
    subprocess.run(
      [sys.executable, "-c", UNSTOPPED, tmp_path],
      cwd=ROOT,
      env=environment(),
      check=True,
    )
  leases = [p.name for p in tmp_path.iterdir() if p.name.startswith("lease")]
  assert not leases


def test_step_comes_after_start(tmp_path):
  island = islands.join(
    tmp_path, make_params(), OUTER, codec=codecs.identity(), every=1
  )
  with pytest.raises(RuntimeError, match="`step` must come between"):
    island.step(make_params())
  params = island.start()
  with pytest.raises(ValueError, match="`params` must be like those"):
    island.step(jax.tree.map(lambda p: p.astype(jnp.bfloat16), params))
  island.stop()


def test_a_mean_is_weighted_by_tokens(tmp_path):
  params = {"w": jnp.zeros(4)}
  members = [
    islands.join(
      tmp_path,
      params,
      optax.sgd(1.0),
      codec=codecs.identity(),
      every=1,
      name=f"island{i}",
      quorum=3,
    )
    for i in range(3)
  ]

  def train(i):
    start = members[i].start()
    return members[i].step({"w": start["w"] + i}, tokens=i + 1)

  found = run_all([lambda i=i: train(i) for i in range(3)])
  for one, member in zip(found, members, strict=True):
    np.testing.assert_allclose(one["w"], (0 * 1 + 1 * 2 + 2 * 3) / 6, rtol=1e-6)
    assert_same_bits(one, found[0])
    member.stop()


def test_parameters_that_are_sharded_stay_where_they_are(tmp_path):
  mesh = jax.sharding.Mesh(jax.devices()[:4], ("model",))
  sharding = jax.sharding.NamedSharding(mesh, jax.P("model"))
  params = {"w": jnp.zeros((8, 3))}
  island = islands.join(
    tmp_path, params, optax.sgd(1.0), codec=CODECS["int8"], every=1
  )
  own = jax.device_put(island.start(), sharding)
  for _ in range(3):
    own = island.step(jax.tree.map(lambda p: p + 1, own))
    assert own["w"].sharding == sharding
  np.testing.assert_allclose(own["w"], 3, rtol=0.02)
  assert island.round == 3
  island.stop()
