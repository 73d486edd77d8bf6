"""Preset `dgc`: deep gradient compression, one element in a thousand."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmotion import codecs, core, transforms
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.presets import _shared

_TINY = 1e-30


def dgc(
  axis_name: AxisName,
  *,
  density: float = 0.001,
  momentum: float = 0.9,
  nesterov: bool = False,
  masking: bool = True,
  clip_norm: float | None = 1.0,
  warmup: int = 1000,
  stages: int = 4,
  min_size: int = 1024,
  nonfinite: str = "skip",
  as_coded: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Makes `exchange` with momentum and few elements (DGC).

  Each worker adds its momentum up and sends the greatest elements of the sum;
  they start from zero again, and so does their momentum. Vectors and leaves of
  fewer than `min_size` elements travel whole. Follow it by an optimizer without
  momentum, such as `optax.sgd(0.1)`: the momentum is here.

  During the first `warmup` updates more is sent, in `stages` of equal length,
  each with the same factor less: early gradients change fast. Gradients are
  clipped on each worker, to `clip_norm` / sqrt(workers), before they enter the
  memory. Without both, training may diverge.

  Ours differs from the reference thus. The greatest element of each block of
  about 1 / density is sent. The reference takes those beyond a threshold that a
  sample determines. It leaves out more of them at the end of an array. The
  momentum of what travels whole is kept before the exchange. Between three
  workers or more, the mean of a large array is selected once more. The
  reference gathers all payloads, whose bytes grow with the workers.
  `as_coded=True` gathers too. It sends the greatest elements of whole arrays,
  as the reference does without sampling, of all arrays of two dimensions.

  Args:
    axis_name: the workers' axis, or `HostAxes`.
    density: share of the elements that is sent, in (0, 1].
    momentum: factor on the momentum, in [0, 1).
    nesterov: whether the gradient is added once more.
    masking: whether elements that were sent lose their momentum.
    clip_norm: greatest norm of all workers' gradients together, if they are
      independent; None does not clip.
    warmup: number of updates before `density` is reached; 0 for none.
    stages: number of densities during the warm-up.
    min_size: least number of elements of a leaf that is not sent whole.
    nonfinite: "propagate", "skip" or "zero", for gradients.
    as_coded: whether to select as the reference does.

  Returns:
    A transformation that takes the place of `exchange(...)` in a chain.

  Raises:
    TypeError, ValueError: an argument of another type or out of range.

  Example:
    >>> tx = optax.chain(dgc("data", clip_norm=None), optax.sgd(0.5))
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> from jaxmotion import make_train_step
    >>> init, step = make_train_step(lambda w, x: jnp.mean(x @ w), tx, mesh)
    >>> state = init(jnp.ones((4, 1)))
    >>> state, loss = step(state, jnp.ones((2, 4)))
    >>> state.params.tolist()
    [[0.5], [0.5], [0.5], [0.5]]

  References:
    Lin et al., *Deep Gradient Compression: Reducing the Communication Bandwidth
    for Distributed Training*, arXiv 1712.01887, 2018. Code:
    synxlin/deep-gradient-compression, commit 24673d4.
  """
  core.check_number("density", density, 0, 1, open_low=True)
  core.check_number("momentum", momentum, 0, 1, open_high=True)
  core.check_int("warmup", warmup, 0, 2**31 - 1)
  core.check_int("stages", stages, 1, 64)
  core.check_int("min_size", min_size, 0)
  core.check_bool("as_coded", as_coded)
  options: dict[str, Any] = dict(decay=momentum, nesterov=nesterov)
  factor = density ** (1 / (stages + 1))
  densities = [factor ** (stage + 1) for stage in range(stages)]
  ladder = [
    codecs.where_smaller(
      codecs.momentum_correction(
        codecs.feedback(_select(share, as_coded)), masking=masking, **options
      ),
      codecs.momentum_correction(codecs.identity(), masking=False, **options),
      min_size=0 if as_coded else min_size,
      min_dimensions=2,
      # The size of a payload must not decide, or states of levels would differ.
      min_ratio=1e-9,
    )
    for share in (density, *(densities[::-1] if warmup else ()))
  ]

  # Updates at which each stage ends, the last one at `warmup`.
  ends = [warmup * (stage + 1) // stages for stage in range(stages)]

  def level(count: Array) -> Array:
    # The last stage has level 0.
    return stages - jnp.sum(count >= jnp.asarray(ends, jnp.int32))

  tx = transforms.exchange(
    axis_name,
    ladder if warmup else ladder[0],
    # The reference gathers what all have selected, and selects it once.
    method="gather" if as_coded else None,
    schedule=level if warmup else None,
  )
  if clip_norm is not None:
    core.check_number("clip_norm", clip_norm, 0, open_low=True)
    tx = optax.chain(_clip_locally(clip_norm, axis_name), tx)
  return _shared.guard_nonfinite(tx, nonfinite, axis_name)


def _select(density: float, as_coded: bool) -> codecs.Codec:
  if not as_coded:
    return codecs.topk(density=density)
  whole = codecs.tiles(chunk=2**31 - 1)  # The whole array in one column.
  return codecs.chain(whole, codecs.topk_columns(density=density))


def _clip_locally(
  clip_norm: float, axis_name: AxisName
) -> optax.GradientTransformation:
  """Scales each worker's gradient to a norm that is at most its share."""

  def clip(updates: PyTree, params: PyTree) -> PyTree:
    del params
    leaves = [a for a in jax.tree.leaves(updates) if a.size]
    if not leaves:
      return updates
    count = core.axis_size(axis_name)
    # In units of the greatest element, whose square may leave float32.
    greatest = functools.reduce(
      jnp.maximum, [jnp.abs(a).max().astype(jnp.float32) for a in leaves]
    )
    unit = jnp.maximum(greatest, _TINY)
    squares = [jnp.sum((a / unit).astype(jnp.float32) ** 2) for a in leaves]
    norm = jnp.sqrt(sum(squares, jnp.float32(_TINY)))
    scale = clip_norm / math.sqrt(count) / unit / norm
    # What is not finite is not clipped; the policy decides about it.
    scale = jnp.where(jnp.isfinite(greatest), jnp.minimum(scale, 1.0), 1.0)
    return jax.tree.map(lambda a: (a * scale).astype(a.dtype), updates)

  return optax.stateless(clip)
