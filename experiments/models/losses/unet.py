"""UNet of diffusion models: group norm, SiLU, skip connections."""

import functools

import jax
import jax.numpy as jnp
from jax import lax, nn
from jax.ad_checkpoint import checkpoint_name

from experiments.models.losses import task
from jaxmotion.core import Array, PyTree

_GROUPS = 8


def make_unet(
  wrap: task.Wrap = task.run_plain,
  *,
  channels: int = 128,
  levels: int = 3,
  blocks: int = 2,
  batch: int = 32,
  image: int = 64,
) -> task.Task:
  """Returns a UNet that predicts the noise of an image, in float32."""
  # Every level has blocks of two convolutions before and after the lower
  # levels. What enters the lower levels is joined with what comes back from
  # them.
  block = wrap(_run_block)

  def loss_fn(params: PyTree, batch: dict[str, Array]) -> Array:
    x, skips = _convolve(batch["noisy"], params["first"]), []
    for i in range(levels):
      for j in range(blocks):
        x = block(params[f"down{i}_{j}"], x)
        skips.append(x)
      if i + 1 < levels:
        x = _convolve(x, params[f"halve{i}"], 2)
    for i in reversed(range(levels)):
      for j in range(blocks):
        joined = jnp.concatenate([x, skips.pop()], -1)
        x = block(params[f"up{i}_{j}"], joined)
      if i:
        x = _convolve(_double(x), params[f"double{i}"])
    y = _convolve(_normalize(params["norm"], x), params["last"])
    return jnp.mean((y - batch["noise"]) ** 2)

  params: dict[str, PyTree] = {"first": _shape(3, 3, 3, channels)}
  before, widths = channels, [channels << i for i in range(levels)]
  for i, now in enumerate(widths):
    for j in range(blocks):
      params[f"down{i}_{j}"] = _block_shapes(before, now)
      before = now
    if i + 1 < levels:
      params[f"halve{i}"] = _shape(3, 3, now, now)
  for i, now in reversed(list(enumerate(widths))):
    for j in range(blocks):
      params[f"up{i}_{j}"] = _block_shapes(before + now, now)
      before = now
    if i:
      params[f"double{i}"] = _shape(3, 3, now, now)
  params["norm"] = _norm_shapes(before)
  params["last"] = _shape(3, 3, before, 3)
  pixels = _shape(batch, image, image, 3)
  return task.Task(loss_fn, params, {"noisy": pixels, "noise": pixels})


_shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)


def _norm_shapes(channels: int) -> PyTree:
  return {"scale": _shape(channels), "bias": _shape(channels)}


def _block_shapes(inputs: int, outputs: int) -> PyTree:
  shapes = {
    "norm1": _norm_shapes(inputs),
    "conv1": _shape(3, 3, inputs, outputs),
    "norm2": _norm_shapes(outputs),
    "conv2": _shape(3, 3, outputs, outputs),
  }
  if inputs != outputs:
    shapes["shortcut"] = _shape(1, 1, inputs, outputs)
  return shapes


def _run_block(params: PyTree, x: Array) -> Array:
  """Adds two convolutions, each after group norm and SiLU."""
  y = _convolve(_normalize(params["norm1"], x), params["conv1"])
  y = checkpoint_name(y, "conv1")
  y = _convolve(_normalize(params["norm2"], y), params["conv2"])
  y = checkpoint_name(y, "conv2")
  if "shortcut" in params:
    x = checkpoint_name(_convolve(x, params["shortcut"]), "shortcut")
  return x + y


def _normalize(params: PyTree, x: Array) -> Array:
  """Applies group norm and SiLU."""
  groups = x.reshape(*x.shape[:-1], _GROUPS, -1)
  axes = (1, 2, 4)
  mean = groups.mean(axes, keepdims=True)
  variance = groups.var(axes, keepdims=True)
  y = ((groups - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape)
  return nn.silu(y * params["scale"] + params["bias"])


_convolve_same = functools.partial(
  lax.conv_general_dilated,
  padding="SAME",
  dimension_numbers=("NHWC", "HWIO", "NHWC"),
)


def _convolve(x: Array, kernel: Array, stride: int = 1) -> Array:
  return _convolve_same(x, kernel, (stride, stride))


def _double(x: Array) -> Array:
  return x.repeat(2, 1).repeat(2, 2)
