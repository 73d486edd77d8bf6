"""Transformer that translates: an encoder, and a decoder that reads from it."""

import functools

import jax
import jax.numpy as jnp
from jax import lax, nn
from jax.ad_checkpoint import checkpoint_name

from experiments.models.losses import attention, task
from jaxmotion.core import Array, PyTree


def make_encoder_decoder(
  wrap: task.Wrap = task.run_plain,
  *,
  layers: int = 6,
  width: int = 1024,
  heads: int = 16,
  batch: int = 16,
  length: int = 512,
) -> task.Task:
  """Returns as many encoder as decoder blocks, in two loops, in bfloat16."""
  encode = wrap(functools.partial(_encode, heads=heads))
  decode = wrap(functools.partial(_decode, heads=heads))

  def loss_fn(params: PyTree, batch: dict[str, Array]) -> Array:
    source, _ = lax.scan(
      lambda x, own: (encode(own, x), None), batch["source"], params["encode"]
    )
    x, _ = lax.scan(
      lambda x, own: (decode(own, x, source), None),
      batch["target"],
      params["decode"],
    )
    return jnp.mean(x.astype(jnp.float32) ** 2)

  sizes = {
    **{"qkv": (width, 3 * width), "out": (width, width)},
    **{"up": (width, 4 * width), "down": (4 * width, width)},
    **{"scale1": (width,), "scale2": (width,)},
  }
  cross = {
    **{"query": (width, width), "kv": (width, 2 * width)},
    **{"join": (width, width), "scale3": (width,)},
  }
  x = jax.ShapeDtypeStruct((batch, length, width), jnp.bfloat16)
  params = {
    "encode": task.stack_shapes(layers, sizes),
    "decode": task.stack_shapes(layers, sizes | cross),
  }
  return task.Task(loss_fn, params, {"source": x, "target": x})


def _encode(params: PyTree, x: Array, *, heads: int) -> Array:
  return _add_perceptron(params, _attend_self(params, x, heads, causal=False))


def _decode(params: PyTree, x: Array, source: Array, *, heads: int) -> Array:
  x = _attend_self(params, x, heads, causal=True)
  q = task.project(task.normalize_rms(x, params["scale3"]), params["query"])
  q = checkpoint_name(q, "query")
  kv = checkpoint_name(task.project(source, params["kv"]), "kv")
  k, v = jnp.split(kv, 2, -1)
  y = task.project(_attend(q, k, v, heads, causal=False), params["join"])
  return _add_perceptron(params, x + checkpoint_name(y, "join"))


def _attend_self(
  params: PyTree, x: Array, heads: int, *, causal: bool
) -> Array:
  """Adds attention of positions to others of the same text."""
  h = task.normalize_rms(x, params["scale1"])
  qkv = checkpoint_name(task.project(h, params["qkv"]), "qkv")
  q, k, v = jnp.split(qkv, 3, -1)
  y = task.project(_attend(q, k, v, heads, causal=causal), params["out"])
  return x + checkpoint_name(y, "out")


def _attend(q: Array, k: Array, v: Array, heads: int, *, causal: bool) -> Array:
  """Computes attention in heads, each of some of the channels."""
  split = lambda x: x.reshape(*x.shape[:2], heads, -1)
  keep = lambda weights: weights
  y = attention.attend_all(split(q), split(k), split(v), keep, causal=causal)
  return checkpoint_name(y.reshape(q.shape), "attention")


def _add_perceptron(params: PyTree, x: Array) -> Array:
  h = task.normalize_rms(x, params["scale2"])
  up = checkpoint_name(task.project(h, params["up"]), "up")
  return x + task.project(nn.relu(up), params["down"])
