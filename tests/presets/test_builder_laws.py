"""Laws of presets that build a step or divide its state, as of the others."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh

import jaxmotion
from jaxmotion import codecs, presets, transforms, wire
from tests.presets.helpers import (
  BAD,
  layout_bytes,
  mean_bytes,
  poison,
  random_gradients,
)

PARAMS = {
  "matrix": np.zeros((48, 64), np.float32),
  "vector": np.zeros(40, np.float32),
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
CODED = {
  "diloco": None,
  "muloco": codecs.feedback(UNIFORM(bits=2)),
  "streaming_diloco": codecs.feedback(
    codecs.chain(codecs.rotate(), UNIFORM(bits=4))
  ),
  "streaming_e3m0": codecs.microscaling(format="float4_e3m0"),
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
"""Codec of what a worker has changed, by preset of local updates."""


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
  loss = loss_fn
  match name:
    case "diloco":
      scheme = presets.diloco(SGD, **rounds)
    case "muloco":
      scheme = presets.muloco(0.02, **rounds)
    case "streaming_diloco":
      scheme = presets.streaming_diloco(SGD, fragments=2, **rounds)
    case "streaming_e3m0":
      scheme = presets.streaming_diloco(
        SGD, codec=CODED[name], fragments=2, **rounds
      )
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
  devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
  return Mesh(devices, ("host", "device")[: len(shape)])


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


def predict_local(name, workers, devices=None):
  """All fragments of local updates."""
  method = "gather" if name == "sparse_loco" else None
  fragments = [PARAMS]
  if name.startswith("streaming"):
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


def check_bytes(name, *shape, compiled):
  """Holds predicted, traced and, if asked for, compiled bytes to each other."""
  _, step, args = prepare(name, *shape)
  workers, branch = math.prod(shape), 1 if name in CODED else None
  predict = predict_local if name in CODED else predict_divided
  # The mean loss, and the agreement that all is finite.
  predicted = predict(name, *shape) + 2 * mean_bytes(workers)
  found = [wire.step_bytes(step, *args, branch=branch)]
  if compiled:
    found.append(wire.compiled_bytes(compile_step(name, *shape), branch=branch))
  for ledger in found:
    assert ledger.total_bytes == pytest.approx(predicted), name


SHAPES = [(name, (n,)) for name in (*CODED, *CUT) for n in (2, 3, 4, 8)]
SHAPES += [(name, shape) for name in CUT for shape in ((2, 2), (4, 2))]
SHAPES += [(name, (2, 2)) for name in CODED]
COMPILED = {(name, (4,)) for name in CODED} | {(n, (2, 2)) for n in CUT}
COMPILED |= {("muloco", (2, 2)), ("streaming_diloco", (2, 2))}
COMPILED |= {("muloco", (3,)), *((name, (3,)) for name in CUT)}


# Compiled bytes hold for all shapes, of which each takes a second or two.
@pytest.mark.parametrize(("name", "shape"), SHAPES, ids=str)
def test_bytes_are_predicted_traced_and_compiled_alike(name, shape):
  check_bytes(name, *shape, compiled=(name, shape) in COMPILED)


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
  if name in DIVIDED:
    kept = jax.tree.leaves_with_path(state)
  else:
    kept = jax.tree.leaves_with_path((state.params, state.opt_state.outer))
  return {
    path: np.asarray(a).tobytes()
    for path, a in ((jax.tree_util.keystr(p), a) for p, a in kept)
    if not path.endswith((".skipped", ".count"))
  }


@pytest.mark.parametrize("name", [*CODED, *DIVIDED])
def test_bad_gradients_pass_and_replicas_stay_equal(name):
  init, _, _ = prepare(name, *((2, 2) if name in DIVIDED else (4,)))
  good = [random_gradients(seed, 4, PARAMS) for seed in range(4)]
  first = run_steps(name, init(PARAMS), *good[:2])
  for kind in BAD:
    bad = poison(random_gradients(4, 4, PARAMS), kind)
    # Local updates exchange in every second step, others in every one.
    state = run_steps(name, first, bad, bad)
    if kind in ("NaN", "infinite") and not name.startswith("streaming"):
      assert read_kept(name, state) == read_kept(name, first), kind
    state = run_steps(name, state, *good[2:])
    for path, a in jax.tree.leaves_with_path(state):
      where = f"{kind}: {jax.tree_util.keystr(path)}"
      assert np.isfinite(a).all(), where
    for a in jax.tree.leaves(state.params):
      if a.is_fully_replicated:
        copies = {np.asarray(s.data).tobytes() for s in a.addressable_shards}
        assert len(copies) == 1, kind
