"""Laws that all presets keep: bytes, replicas, bad gradients."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxmotion
from jaxmotion import codecs, perfmodel, presets, transforms, wire
from jaxmotion.perfmodel.extend import make_layout
from jaxmotion.transforms.extend import find_exchanges
from tests.collectives.helpers import copies
from tests.meshes import mesh_of

PARAMS = {
  "matrix": np.zeros((48, 64), np.float32),
  "vector": np.zeros(40, np.float32),
}
# The warm-up of `dgc` has a test of its own.
EXCHANGES = {
  "power_sgd": presets.power_sgd("data", rank=2, start=0, nonfinite="skip"),
  "dgc": presets.dgc("data", density=0.05, warmup=0),
  "ef21_sgdm": presets.ef21_sgdm("data"),
  "onebit_two_phase": presets.onebit_adam(
    "data", 0.1, freeze=1, codec=codecs.onebit()
  ),
  "demo": presets.demo("data", 0.1, chunk=16),
  "lion": presets.lion("data", 0.1, weight_decay=0.0),
  "power_sgd_in_turn": presets.power_sgd(
    "data", rank=2, start=0, form="alternating", nonfinite="skip"
  ),
  "onebit_adam": presets.onebit_adam("data", 0.1, freeze=1),
  "signum": presets.signum("data", 0.1, one_bit=True),
}
SGD = optax.sgd(0.1, momentum=0.9)
UNIFORM = codecs.uniform
INT8 = UNIFORM(bits=8, block=512, rounding="stochastic")
ROTATED = codecs.chain(
  codecs.rotate(block=32), UNIFORM(bits=4, block=128, rounding="stochastic")
)
DIVIDED = ("sdp4bit", "zeropp")
CUT = ("sdp4bit", "zeropp_layers")
LAYERS = 2
# Codec of what a worker has changed, by preset of local updates.
CODED = {
  "diloco": None,
  "muloco": codecs.feedback(UNIFORM(bits=2)),
  "streaming_diloco": codecs.feedback(
    codecs.chain(codecs.rotate(), UNIFORM(bits=4))
  ),
  "sparse_loco": codecs.feedback(
    codecs.chain(
      codecs.tiles(chunk=64, fit="pad", shape="square"),
      codecs.contributors(
        codecs.chain(
          codecs.topk_columns(count=64), codecs.codebook(bits=2, span=6.0)
        )
      ),
    ),
    decay=0.95,
  ),
}


def poison(grads, kind):
  """Gradients of all workers, of which something is bad."""
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


def random_gradients(seed, workers, params):
  """Gradients of all workers."""
  rng = np.random.default_rng(seed)
  return {
    k: rng.normal(size=(workers, *a.shape)).astype(np.float32)
    for k, a in params.items()
  }


def mean_bytes(workers, nbytes=4):
  """What one worker sends to average so many bytes at full precision."""
  return 2 * (workers - 1) / workers * nbytes


def layout_bytes(tree, codec, workers, method=None, devices=None):
  """What an exchange of a tree sends by what its codec asks for."""
  link = perfmodel.Link(latency_s=1e-3, rate=perfmodel.gbit_per_s(1))
  axis, local = (
    n and perfmodel.Axis(name=name, workers=n, link=link)
    for name, n in (("host", workers), ("device", devices))
  )
  return make_layout(tree, axis, codec, method, local).ledger.total_bytes


def loss_fn(params, batch):
  """A loss whose gradient is the mean of the batch."""
  terms = jax.tree.map(lambda p, a: jnp.sum(p * a.mean(0)), params, batch)
  return sum(jax.tree.leaves(terms))


@transforms.gather_block
def use_layer(layer, grads):
  """Needs the layer once more in the backward pass."""
  return jnp.sum(jnp.tanh(layer) * grads.mean(0))


def gathered_loss(params, batch):
  layer = use_layer(params["matrix"], batch["matrix"])
  return layer + jnp.sum(params["vector"] * batch["vector"].mean(0))


def layered_loss(params, batch):
  """The same with layers in a loop, of which XLA merges no two gathers."""
  layers = (params["matrix"], batch["matrix"].swapaxes(0, 1))
  total = jnp.sum(params["vector"] * batch["vector"].mean(0))
  return total + lax.map(lambda layer: use_layer(*layer), layers).sum()


def make_step(name, mesh):
  """Returns `init` and `step` of a preset on one or two axes."""
  outer, *inner = mesh.axis_names
  axes = jaxmotion.HostAxes(outer, *inner) if inner else outer
  rounds = dict(every=2, axis_name=axes, nonfinite="skip")
  loss, scheme = loss_fn, EXCHANGES.get(name)
  match name:
    case "diloco":
      scheme = presets.diloco(SGD, **rounds)
    case "muloco":
      scheme = presets.muloco(0.02, **rounds)
    case "streaming_diloco":
      scheme = presets.streaming_diloco(SGD, fragments=2, **rounds)
    case "sparse_loco":
      tx = presets.sparse_loco(axes, nonfinite="propagate")
      scheme = jaxmotion.local_updates(SGD, tx, every=2, nonfinite="skip")
    case "sdp4bit":
      scheme = presets.sdp4bit(axes, SGD, nonfinite="skip")
    case "zeropp" | "zeropp_layers":
      is_layered = name != "zeropp"
      loss = layered_loss if is_layered else gathered_loss
      scheme = presets.zeropp(
        SGD, nonfinite="skip", stacked="matrix" if is_layered else None
      )
  return jaxmotion.make_train_step(loss, scheme, mesh, axis_name=axes)


def make_mesh(*shape):
  names = ("host", "device") if len(shape) == 2 else ("data",)
  return mesh_of(*shape, names=names)


@functools.cache
def prepare(name, *shape):
  """The step of a preset, and the shapes of its arguments."""
  init, step = make_step(name, make_mesh(*shape))
  params = PARAMS
  if name == "zeropp_layers":
    params = params | {"matrix": np.stack([params["matrix"]] * LAYERS)}
  state = jax.eval_shape(init, params)
  return init, step, (state, random_gradients(0, math.prod(shape), params))


@functools.cache
def compile_step(name, *shape):
  _, step, args = prepare(name, *shape)
  return step.lower(*args).compile()


def predict_exchange(name, workers):
  """What its codec asks for, of the exchange that it goes on with at last."""
  _, _, (state, _) = prepare(name, workers)
  options = find_exchanges(state.opt_state)[-1].made_for
  return layout_bytes(PARAMS, options.codecs[0], workers, options.method)


def predict_local(name, workers, devices=None):
  """All fragments of local updates."""
  method = "gather" if name == "sparse_loco" else None
  fragments = [PARAMS]
  if name == "streaming_diloco":
    fragments = [{k: a} for k, a in PARAMS.items()]
  return sum(
    layout_bytes(f, CODED[name], workers, method, devices) for f in fragments
  )


def predict_divided(name, hosts, devices=1):
  """Parts of the matrix, and the whole vector, which is too small to cut."""
  vector, workers = {"vector": PARAMS["vector"]}, hosts * devices
  rows, columns = PARAMS["matrix"].shape
  part = jax.ShapeDtypeStruct((rows // workers, columns), np.float32)
  of_hosts = jax.ShapeDtypeStruct((hosts, *part.shape), np.float32)
  if name == "sdp4bit":
    gradient, within, weights = ROTATED, INT8, UNIFORM(bits=4, block=2048)
    small = layout_bytes(vector, gradient, workers)
  else:
    gradient = within = UNIFORM(bits=4, block=128)
    weights = UNIFORM(bits=8, block=2048)
    local = None if devices == 1 else devices
    small = layout_bytes(vector, None, hosts, devices=local)
  sent, own = (wire.payload_bytes(c, part) for c in (gradient, weights))
  # ZeRO++ gathers weights again: within a host, if there is one to gather in.
  again, layers = (0, 1) if name == "sdp4bit" else (1, LAYERS)
  between = sent + own * (1 + again * (devices == 1))
  inside = wire.payload_bytes(within, of_hosts) + hosts * own * (1 + again)
  return small + layers * ((hosts - 1) * between + (devices - 1) * inside)


# Their programs are those of `onebit_two_phase` and `lion`, but for a codec.
ALIKE = ("onebit_adam", "signum")
# (name, lengths of the axes, is compiled): a compiled program takes a second.
SHAPES = [(name, (4,), name not in ALIKE) for name in EXCHANGES]
SHAPES += [(name, (2,), False) for name in ("ef21_sgdm", "onebit_adam")]
SHAPES += [(name, (3,), False) for name in ("lion", "power_sgd")]
SHAPES += [("dgc", (8,), False)]
SHAPES += [("onebit_two_phase", (3,), True)]
SHAPES += [(name, (3,), False) for name in ("muloco", "sparse_loco")]
SHAPES += [(name, (4,), True) for name in CODED]
SHAPES += [
  (name, (2, 2), name == "muloco") for name in CODED if "_d" not in name
]
SHAPES += [(name, (2, 2), True) for name in CUT]
SHAPES += [(name, shape, False) for name in CUT for shape in ((3,), (4, 2))]


@pytest.mark.parametrize(("name", "shape", "is_compiled"), SHAPES, ids=str)
def test_bytes_are_predicted_traced_and_compiled_alike(
  name, shape, is_compiled
):
  _, step, args = prepare(name, *shape)
  workers = math.prod(shape)
  if name in EXCHANGES:
    predict, branch = predict_exchange, 0
  elif name in CODED:
    predict, branch = predict_local, 1
  else:
    predict, branch = predict_divided, None
  # The mean loss, and the agreement that all is finite.
  predicted = predict(name, *shape) + 2 * mean_bytes(workers)
  found = [wire.step_bytes(step, *args, branch=branch)]
  if is_compiled:
    found.append(wire.compiled_bytes(compile_step(name, *shape), branch=branch))
  for ledger in found:
    assert ledger.total_bytes == pytest.approx(predicted), name


def run_steps(name, state, *batches):
  """The state after some steps of four workers."""
  shape = (2, 2) if name in DIVIDED else (4,)
  compiled = compile_step(name, *shape)
  state = jax.tree.map(jnp.copy, state)  # A step may take its buffers.
  for batch in batches:
    state, _ = compiled(state, batch)
  return state


def read_kept(name, state):
  """What a step that is left out must not change, by path."""
  if name in CODED:
    state = (state.params, state.opt_state.outer)
  return {
    path: np.asarray(a).tobytes()
    for path, a in (
      (jax.tree_util.keystr(p), a) for p, a in jax.tree.leaves_with_path(state)
    )
    if not path.endswith((".skipped", ".count"))
  }


@pytest.mark.parametrize(
  "name", [n for n in (*EXCHANGES, *CODED, *DIVIDED) if n not in ALIKE]
)
def test_bad_gradients_pass_and_replicas_stay_equal(name):
  init, _, _ = prepare(name, *((2, 2) if name in DIVIDED else (4,)))
  good = [random_gradients(seed, 4, PARAMS) for seed in range(4)]
  first = run_steps(name, init(PARAMS), *good[:2])
  for kind in BAD:
    bad = poison(random_gradients(4, 4, PARAMS), kind)
    # Local updates exchange in every second step, others in every one.
    state = run_steps(name, first, bad, bad)
    if kind in ("NaN", "infinite") and name != "streaming_diloco":
      assert read_kept(name, state) == read_kept(name, first), kind
    state = run_steps(name, state, *good[2:])
    for path, a in jax.tree.leaves_with_path(state):
      where = f"{kind}: {jax.tree_util.keystr(path)}"
      assert np.isfinite(a).all(), where
    for a in jax.tree.leaves(state.params):
      if a.is_fully_replicated:
        assert len(copies(a)) == 1, kind
