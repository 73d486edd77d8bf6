"""Preset `diloco`: workers that exchange every few hundred steps."""

from typing import Any

import optax

from jaxmotion import codecs, transforms
from jaxmotion.core import AxisName
from jaxmotion.presets import _shared


def diloco(
  inner: optax.GradientTransformation,
  *,
  every: int = 500,
  outer_rate: float = 0.7,
  outer_momentum: float = 0.9,
  codec: codecs.Codec | None = None,
  axis_name: AxisName = "data",
  **options: Any,
) -> transforms.Scheme:
  """Makes the scheme `local_updates` with Nesterov's momentum outside (DiLoCo).

  Each worker trains by itself for 500 steps. Then the mean of what they have
  changed is the gradient of gradient descent with Nesterov's momentum. The
  paper's inner optimizer is AdamW.

  Ours differs from the paper thus. Workers may have unequal weights
  (`weight_fn`). With `nonfinite="skip"`, a worker whose parameters are not
  finite begins at the anchor, and nothing is sent in that round. Payloads go
  through a codec, if there is one.

  Args:
    inner: optimizer of each worker, such as `optax.adamw(4e-4)`.
    every: number of steps between two exchanges.
    outer_rate: learning rate of the outer optimizer.
    outer_momentum: its momentum, in [0, 1).
    codec: codec of what workers have changed; None is full precision.
    axis_name: the workers' axis, or `HostAxes`.
    **options: other arguments of `local_updates`, such as `mix`.

  Returns:
    A scheme for `make_train_step`, as from `local_updates`.

  Raises:
    TypeError: an option that the preset sets.
    TypeError, ValueError: as `local_updates` and `exchange`.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> init, step = transforms.make_train_step(
    ...   lambda w, x: jnp.mean(x @ w), diloco(optax.adamw(4e-4), every=2), mesh
    ... )
    >>> state = init(jnp.ones((16, 8)))
    >>> state, loss = step(state, jnp.ones((4, 16)))
    >>> float(loss)
    16.0

  References:
    Douillard et al., *DiLoCo: Distributed Low-Communication Training of
    Language Models*, arXiv 2311.08105, 2023.
  """
  _shared.refuse_options("diloco", "local_updates", ("outer",), options)
  outer = _shared.make_nesterov(axis_name, codec, outer_rate, outer_momentum)
  return transforms.local_updates(inner, outer, every=every, **options)
