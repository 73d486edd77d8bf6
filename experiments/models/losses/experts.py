"""Transformer whose perceptrons are mixtures of experts."""

import functools

import jax
import jax.numpy as jnp
from jax import lax, nn
from jax.ad_checkpoint import checkpoint_name

from experiments.models.losses import attention, task
from jaxmotion.core import Array, PyTree

_CHOSEN = 2  # Experts of a token.


def make_experts(
  wrap: task.Wrap = task.run_plain,
  *,
  layers: int = 8,
  width: int = 1024,
  heads: int = 16,
  experts: int = 8,
  batch: int = 8,
  length: int = 1024,
  capacity: float = 1.25,
) -> task.Task:
  """Returns blocks of attention and of a mixture of experts, in bfloat16."""
  # Each token goes to its two best experts. An expert takes a number of tokens
  # of each example; tokens beyond that are dropped. Dispatch and combination
  # are products with masks, as in GShard.
  slots = max(1, int(capacity * _CHOSEN * length / experts))
  block = wrap(functools.partial(_run_block, heads=heads, slots=slots))
  sizes = {
    **{"qkv": (width, 3 * width), "out": (width, width)},
    **{"scale1": (width,), "scale2": (width,), "route": (width, experts)},
    **{name: (experts, width, 2 * width) for name in ("gate", "up")},
    "down": (experts, 2 * width, width),
  }
  params = task.stack_shapes(layers, sizes)
  x = jax.ShapeDtypeStruct((batch, length, width), jnp.bfloat16)
  return task.Task(task.make_scanned_loss(block), params, x)


def _run_block(params: PyTree, x: Array, *, heads: int, slots: int) -> Array:
  """Adds attention, then the outputs of the tokens' experts."""
  shape, width = x.shape[:2], x.shape[-1]
  h = task.normalize_rms(x, params["scale1"])
  qkv = checkpoint_name(h @ params["qkv"].astype(x.dtype), "qkv")
  parts = qkv.reshape(*shape, 3 * heads, width // heads)
  q, k, v = jnp.split(parts, 3, axis=2)
  y = attention.attend_all(q, k, v, lambda weights: weights)
  y = checkpoint_name(y.reshape(x.shape), "attention")
  x = x + checkpoint_name(y @ params["out"].astype(x.dtype), "out")
  return x + _mix_experts(
    params, task.normalize_rms(x, params["scale2"]), slots
  )


def _mix_experts(params: PyTree, x: Array, slots: int) -> Array:
  """Runs each token through its experts, and adds what they return."""
  gate, up, down = (params[n].astype(x.dtype) for n in ("gate", "up", "down"))
  combine = _route(x.astype(jnp.float32) @ params["route"], slots)
  dispatch = (combine > 0).astype(x.dtype)
  taken = jnp.einsum("btec,btd->ebcd", dispatch, x)
  taken = checkpoint_name(taken, "taken")
  a = checkpoint_name(jnp.einsum("ebcd,edf->ebcf", taken, gate), "gate")
  b = checkpoint_name(jnp.einsum("ebcd,edf->ebcf", taken, up), "up")
  y = jnp.einsum("ebcf,efd->ebcd", nn.silu(a) * b, down)
  y = checkpoint_name(y, "down")
  return jnp.einsum("btec,ebcd->btd", combine.astype(x.dtype), y)


def _route(logits: Array, slots: int) -> Array:
  """Returns the weight of each token in each slot of each expert."""
  weights, chosen = lax.top_k(nn.softmax(logits), _CHOSEN)
  weights = weights / weights.sum(-1, keepdims=True)
  picks = nn.one_hot(chosen, logits.shape[-1])
  # Places are given out to all first choices, then to all second ones.
  order = picks.swapaxes(1, 2).reshape(len(picks), -1, logits.shape[-1])
  place = (jnp.cumsum(order, 1) - order).reshape(
    len(picks), _CHOSEN, -1, logits.shape[-1]
  )
  place = (place.swapaxes(1, 2) * picks).sum(-1).astype(jnp.int32)
  slot = nn.one_hot(place, slots)  # Zeros beyond the last slot.
  return jnp.einsum("btk,btke,btkc->btec", weights, picks, slot)
