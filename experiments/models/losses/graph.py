"""Graph network: messages along edges, added up at the nodes they reach."""

import jax
import jax.numpy as jnp
from jax import nn
from jax.ad_checkpoint import checkpoint_name

from experiments.models.losses import task
from jaxmotion.core import Array, PyTree


def make_graph_network(
  wrap: task.Wrap = task.run_plain,
  *,
  layers: int = 8,
  width: int = 256,
  nodes: int = 16_384,
  edges: int = 131_072,
) -> task.Task:
  """Returns rounds of messages between the nodes of a graph, in float32."""
  block = wrap(_run_round)

  def loss_fn(params: list[PyTree], graph: dict[str, Array]) -> Array:
    x = graph["nodes"]
    for own in params:
      x = block(own, x, graph["senders"], graph["receivers"])
    return jnp.mean(x**2)

  shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
  perceptron = {"up": shape(2 * width, width), "down": shape(width, width)}
  own = {
    **{"message": perceptron, "update": perceptron},
    **{name: shape(width) for name in ("scale", "bias")},
  }
  ends = jax.ShapeDtypeStruct((edges,), jnp.int32)
  graph = {"nodes": shape(nodes, width), "senders": ends, "receivers": ends}
  return task.Task(loss_fn, [own] * layers, graph)


def _run_round(
  params: PyTree, x: Array, senders: Array, receivers: Array
) -> Array:
  """Adds to each node what it makes of its messages."""
  pairs = jnp.concatenate([x[senders], x[receivers]], -1)
  messages = _run_perceptron(params["message"], pairs, "message")
  received = jax.ops.segment_sum(messages, receivers, len(x))
  received = checkpoint_name(received, "received")
  both = jnp.concatenate([x, received], -1)
  y = x + _run_perceptron(params["update"], both, "update")
  return task.normalize_layer(y, params["scale"], params["bias"])


def _run_perceptron(params: PyTree, x: Array, name: str) -> Array:
  return nn.silu(checkpoint_name(x @ params["up"], name)) @ params["down"]
