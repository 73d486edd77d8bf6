"""Laws that presets of exchanges keep: bytes, replicas, bad gradients."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jaxmotion
from jaxmotion import perfmodel, presets, wire
from jaxmotion.perfmodel.predict._layout import make_layout
from jaxmotion.transforms.extend import trace_state
from tests.presets.reference import make_run

PARAMS = {
  "matrix": np.zeros((32, 40), np.float32),
  "vector": np.zeros(40, np.float32),
}
PRESETS = {
  "power_sgd": presets.power_sgd("data", rank=2, start=0, nonfinite="skip"),
  "dgc": presets.dgc("data", density=0.05, stages=1, warmup=2),
  "ef21_sgdm": presets.ef21_sgdm("data"),
  "onebit_as_coded": presets.onebit_adam("data", 0.1, freeze=1, as_coded=True),
  "demo": presets.demo("data", 0.1, chunk=16),
  "sparse_loco": presets.sparse_loco("data", chunk=16),
  "lion": presets.lion("data", 0.1, weight_decay=0.0),
}


def make_mesh(workers):
  return Mesh(np.array(jax.devices()[:workers]), ("data",))


def run_all(names=tuple(PRESETS)):
  """A transformation that runs presets, each on gradients of its own."""

  def update(updates, state, params):
    done = {
      name: PRESETS[name].update(updates[name], state[name], params[name])
      for name in names
    }
    return (
      {name: u for name, (u, _) in done.items()},
      {name: s for name, (_, s) in done.items()},
    )

  def init(params):
    return {name: PRESETS[name].init(params[name]) for name in names}

  return optax.GradientTransformation(init, update)


def gradients(seed, workers=4, change=lambda grads: grads):
  """Gradients of all workers for every preset, all of them alike."""
  rng = np.random.default_rng(seed)
  grads = {
    k: rng.normal(size=(workers, *a.shape)).astype(np.float32)
    for k, a in PARAMS.items()
  }
  return dict.fromkeys(PRESETS, change(grads))


def predict_bytes(options, workers):
  """Bytes of an exchange by what its codec asks for, with a check of a skip."""
  link = perfmodel.Link(latency_s=1e-3, rate=perfmodel.gbit_per_s(1))
  axis = perfmodel.Axis(name="data", workers=workers, link=link)
  codec = options.codec
  codec = codec[0] if isinstance(codec, tuple) else codec
  layout = make_layout(PARAMS, axis, codec, options.method, None)
  return layout.ledger.total_bytes + 2 * (workers - 1) / workers * 4


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
  mesh, tx = make_mesh(workers), run_all(names)
  params = dict.fromkeys(names, PARAMS)
  state = jaxmotion.bind_mesh(tx, mesh).init(params)
  grads = {name: gradients(0, workers)[name] for name in names}
  step = jax.jit(run_on(mesh, state, tx))
  return state, step.lower(grads, state, params).compile()


@pytest.mark.parametrize("workers", [2, 8])  # Others are compiled as well.
def test_bytes_are_predicted_and_traced_alike(workers):
  assert traced_bytes(workers)


def traced_bytes(workers):
  """Bytes of each preset, which are those that are predicted."""
  mesh = make_mesh(workers)
  grads, found = worker_shapes(PARAMS, workers), {}
  for name, tx in PRESETS.items():
    traced = trace_state(tx, PARAMS, mesh, "data")
    # Of 1-bit Adam's two exchanges, the last is the one that it goes on with.
    predicted = predict_bytes(traced.exchanges[-1], workers)
    step = run_on(mesh, traced.state, tx)
    ledger = wire.step_bytes(step, grads, traced.state, PARAMS, branch=0)
    assert ledger.total_bytes == pytest.approx(predicted), name
    found[name] = predicted
  return found


@pytest.mark.unoptimized
@pytest.mark.parametrize(
  ("workers", "names"),
  [(4, tuple(PRESETS)), (3, ("onebit_as_coded", "lion", "power_sgd"))],
)
def test_bytes_of_compiled_programs_are_the_traced_ones(workers, names):
  expected = traced_bytes(workers)
  _, compiled = compile_presets(workers, names)
  found = wire.compiled_bytes(compiled, branch=0).total_bytes
  assert found == pytest.approx(sum(expected[name] for name in names))


def poison(grads, kind):
  """Gradients of four workers, of which something is bad."""
  matrix = grads["matrix"].copy()
  match kind:
    case "NaN" | "infinite":
      matrix[1, 2, 3] = np.nan if kind == "NaN" else -np.inf
    case "zero layer":
      matrix[:] = 0
    case "rank 1":
      matrix[:] = np.outer(matrix[0, :, 0], matrix[0, 0])
    case "huge":
      matrix *= np.float32(1e25)
    case "constant row":
      matrix[:, 3] = 0
  return grads | {"matrix": matrix}


BAD = ("NaN", "infinite", "zero layer", "rank 1", "huge", "constant row")


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
