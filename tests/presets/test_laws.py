"""Laws that presets of exchanges keep: bytes, replicas, bad gradients."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

import jaxmotion
from jaxmotion import checkpoint, codecs, presets, wire
from jaxmotion.transforms.extend import find_exchanges, trace_state
from tests.presets.helpers import (
  BAD,
  layout_bytes,
  mean_bytes,
  poison,
  random_gradients,
)
from tests.presets.reference import make_run

PARAMS = {
  "matrix": np.zeros((32, 40), np.float32),
  "vector": np.zeros(40, np.float32),
}
PRESETS = {
  "power_sgd": presets.power_sgd("data", rank=2, start=0, nonfinite="skip"),
  "dgc": presets.dgc("data", density=0.05, warmup=2),
  "ef21_sgdm": presets.ef21_sgdm("data"),
  "onebit_two_phase": presets.onebit_adam(
    "data", 0.1, freeze=1, codec=codecs.onebit()
  ),
  "demo": presets.demo("data", 0.1, chunk=16),
  "sparse_loco": presets.sparse_loco("data", chunk=16),
  "lion": presets.lion("data", 0.1, weight_decay=0.0),
  "power_sgd_in_turn": presets.power_sgd(
    "data", rank=2, start=0, form="alternating", nonfinite="skip"
  ),
  "onebit_adam": presets.onebit_adam("data", 0.1, freeze=1),
  "signum": presets.signum("data", 0.1),
  "signum_one_bit": presets.signum("data", 0.1, one_bit=True),
}


def make_mesh(workers):
  return Mesh(np.array(jax.devices()[:workers]), ("data",))


def run_all(table):
  """A transformation that runs presets, each on gradients of its own."""

  def update(updates, state, params):
    done = {
      name: tx.update(updates[name], state[name], params[name])
      for name, tx in table.items()
    }
    return (
      {name: u for name, (u, _) in done.items()},
      {name: s for name, (_, s) in done.items()},
    )

  def init(params):
    return {name: tx.init(params[name]) for name, tx in table.items()}

  return optax.GradientTransformation(init, update)


def gradients(seed, workers=4, change=lambda grads: grads):
  """Gradients of all workers for every preset, all of them alike."""
  return dict.fromkeys(PRESETS, change(random_gradients(seed, workers, PARAMS)))


def predict_bytes(options, workers):
  """Bytes of an exchange by what its codec asks for, with a check of a skip."""
  sent = layout_bytes(PARAMS, options.codecs[0], workers, options.method)
  return sent + mean_bytes(workers)


def run_on(mesh, state, tx):
  """Returns a preset's update of every worker's own gradients."""
  specs = jaxmotion.state_specs(state, "data")
  return jax.shard_map(
    lambda g, s, p: tx.update(jax.tree.map(lambda a: a[0], g), s, p),
    mesh=mesh,
    in_specs=(P("data"), specs, P()),
    out_specs=(P(), specs),
  )


def worker_shapes(tree, workers):
  return jax.tree.map(
    lambda a: jax.ShapeDtypeStruct((workers, *a.shape), a.dtype), tree
  )


@functools.cache
def compile_presets(workers, names=tuple(PRESETS)):
  """The state of some presets, and one compiled program that runs them."""
  mesh, tx = make_mesh(workers), run_all({n: PRESETS[n] for n in names})
  params = dict.fromkeys(names, PARAMS)
  state = jaxmotion.bind_mesh(tx, mesh).init(params)
  grads = {name: gradients(0, workers)[name] for name in names}
  step = jax.jit(run_on(mesh, state, tx))
  return state, step.lower(grads, state, params).compile()


# All are traced for 4 workers below, and compiled.
@pytest.mark.parametrize(
  ("workers", "names"),
  [(2, tuple(PRESETS)[::2]), (8, tuple(PRESETS)[1::2])],
)
def test_bytes_are_predicted_and_traced_alike(workers, names):
  assert traced_bytes(workers, names)


@functools.cache
def list_exchanges(name):
  """Options of a preset's exchanges, which no number of workers changes."""
  tx = PRESETS[name]
  state = trace_state(tx, PARAMS, make_mesh(4), "data")
  return [node.made_for for node in find_exchanges(state)]


def traced_bytes(workers, names):
  """Bytes of each preset, which are those that are predicted."""
  mesh, found = make_mesh(workers), {}
  for name in names:
    tx = PRESETS[name]
    # Of 1-bit Adam's two exchanges, the last is the one that it goes on with.
    predicted = predict_bytes(list_exchanges(name)[-1], workers)

    def update(grads, tx=tx):
      own = jax.tree.map(lambda a: a[0], grads)
      return tx.update(own, tx.init(PARAMS), PARAMS)[0]

    step = jax.shard_map(update, mesh=mesh, in_specs=P("data"), out_specs=P())
    ledger = wire.step_bytes(step, worker_shapes(PARAMS, workers), branch=0)
    assert ledger.total_bytes == pytest.approx(predicted), name
    found[name] = predicted
  return found


@pytest.mark.unoptimized
@pytest.mark.parametrize(
  ("workers", "names"),
  [(4, tuple(PRESETS)), (3, ("onebit_two_phase", "lion", "power_sgd"))],
)
def test_bytes_of_compiled_programs_are_the_traced_ones(workers, names):
  expected = traced_bytes(workers, names)
  _, compiled = compile_presets(workers, names)
  found = wire.compiled_bytes(compiled, branch=0).total_bytes
  assert found == pytest.approx(sum(expected[name] for name in names))


def to_bits(tree):
  return [np.asarray(a).tobytes() for a in jax.tree.leaves(tree)]


@pytest.mark.unoptimized
def test_bad_gradients_pass_and_replicas_stay_equal():
  params = dict.fromkeys(PRESETS, PARAMS)
  first, compiled = compile_presets(4)

  def update(grads, state):
    return compiled(grads, state, params)

  _, first = update(gradients(0), first)
  for kind in BAD:
    bad = gradients(1, change=lambda grads, kind=kind: poison(grads, kind))
    moved, state = update(bad, first)
    if kind in ("NaN", "infinite"):
      assert not any(np.asarray(a).any() for a in jax.tree.leaves(moved))
      changed = [
        path
        for (path, a), b in zip(
          jax.tree.leaves_with_path(state), jax.tree.leaves(first), strict=True
        )
        if to_bits(a) != to_bits(b)
      ]
      counts = [jax.tree_util.keystr(path) for path in changed]
      assert all(c.endswith((".skipped", ".count")) for c in counts), counts
    moved, state = update(gradients(2), state)
    for path, a in jax.tree.leaves_with_path(moved):
      where = f"{kind}: {jax.tree_util.keystr(path)}"
      assert np.isfinite(a).all(), where
      copies = {np.asarray(s.data).tobytes() for s in a.addressable_shards}
      assert len(copies) == 1, where


@pytest.mark.parametrize("name", PRESETS)
def test_integer_leaves_are_refused_by_name(name):
  whole = {"steps": np.zeros((4, 4), np.int32)}
  with pytest.raises(TypeError, match="`(.*/)?steps` must be"):
    make_run(PRESETS[name], whole)


CONSERVING = {
  "in full at first": presets.power_sgd("data", rank=1, start=1),
  "in turn": presets.power_sgd("data", rank=1, start=1, form="alternating"),
  "by a warm-up": presets.dgc(
    "data",
    density=0.1,
    momentum=0.0,
    clip_norm=None,
    warmup=2,
    min_size=0,
    nonfinite="propagate",
  ),
  "in two phases": jaxmotion.exchange("data", codecs.onebit()),
}


def read_error(part):
  """What the only worker has still to send of an array."""
  state = getattr(part.first, "inner", ()) or part.first
  if hasattr(state, "of_mean"):
    return np.asarray(state.own[0] + state.of_mean[0])
  state = part.first if hasattr(part.first, "memory") else state
  return np.asarray(state.memory.value[0]) if hasattr(state, "memory") else 0.0


def test_what_is_sent_and_remembered_adds_up_through_schedules():
  """Means of all steps and what is left are the means of what came in."""
  params = dict.fromkeys(CONSERVING, PARAMS)
  tx = run_all(CONSERVING)
  mesh, one = make_mesh(4), AbstractMesh((1,), ("data",))
  state = jaxmotion.bind_mesh(tx, mesh).init(params)
  step = jax.jit(run_on(mesh, state, tx))
  sent, exact = [
    jax.tree.map(lambda a: np.zeros(a.shape), params) for _ in range(2)
  ]
  for seed in range(4):
    grads = dict.fromkeys(CONSERVING, gradients(seed)["lion"])
    means, state = step(grads, state, params)
    sent = jax.tree.map(np.add, sent, means)
    exact = jax.tree.map(lambda a, g: a + g.mean(0), exact, grads)
  layout = checkpoint.describe_state(tx, params, mesh)
  rest = checkpoint.resize(tx, state, params, layout, one)
  for name in CONSERVING:
    parts = rest[name].codec_state.value
    left = 0.0
    for part, (leaf, total) in zip(parts, sent[name].items(), strict=True):
      error = read_error(part)
      if np.ndim(error):
        error = error.ravel()[: total.size].reshape(total.shape)
      left += np.abs(error).max()
      np.testing.assert_allclose(
        total + error, exact[name][leaf], atol=1e-5, err_msg=f"{name}: {leaf}"
      )
    assert left > 0.1, name  # Something is still to be sent.
