"""Preset `streaming_diloco`: fragments that workers exchange in turns."""

from typing import Any

import optax

from jaxmotion import codecs, core, transforms
from jaxmotion.core import AxisName
from jaxmotion.presets import _shared

_INT4 = codecs.feedback(codecs.chain(codecs.rotate(), codecs.uniform(bits=4)))
_E3M0 = codecs.microscaling(format="float4_e3m0")


def streaming_diloco(
  inner: optax.GradientTransformation,
  *,
  every: int = 100,
  fragments: int = 4,
  delay: int = 1,
  mix: float = 0.5,
  outer_rate: float = 0.4,
  outer_momentum: float = 0.9,
  codec: codecs.Codec | None = _INT4,
  axis_name: AxisName = "data",
  as_coded: bool = False,
  **options: Any,
) -> transforms.Scheme:
  """Makes the scheme `local_updates` that sends a fragment at a time in 4 bits.

  A quarter of the parameters is sent every 25 steps, lands a step later, and
  workers keep half of their own then.

  Ours differs from the paper thus. Payloads are evenly spaced levels of 4 bits
  after a rotation, with error memory. `as_coded=True` sends the paper's: E3M0,
  a sign and a power of two, without error memory, gathered by all workers and
  added in float32. The paper gives neither its scale nor its rounding: see
  `codecs.microscaling` for ours. In both forms fragments are leaves
  dealt out by size; the paper's are three layers each. The number of fragments
  is fixed, not that of layers in one. A fragment is sent beside the steps that
  follow between CPU hosts alone (`overlap`).

  Args:
    inner: optimizer of each worker, such as `optax.adamw(4e-4)`.
    every: number of steps between two exchanges of the same parameters.
    fragments: number of parts of the parameters, a divisor of `every`.
    delay: number of steps between sending and landing, less than `every`.
    mix: share of its own parameters that a worker keeps, in [0, 1).
    outer_rate: learning rate of the outer optimizer.
    outer_momentum: its momentum, in [0, 1).
    codec: codec of what workers have changed; None is full precision.
    axis_name: the workers' axis, or `HostAxes`.
    as_coded: whether to send the paper's format; `codec` is then the default.
    **options: other arguments of `local_updates`, such as `parts`.

  Returns:
    A scheme for `make_train_step`, as from `local_updates`.

  Raises:
    TypeError: an option that the preset sets.
    ValueError: a `codec` beside `as_coded`.
    TypeError, ValueError: as `local_updates` and `exchange`.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> def loss_fn(params, x):
    ...   return jnp.mean(x @ params["a"] @ params["b"])
    >>> scheme = streaming_diloco(optax.adamw(4e-4), every=4, fragments=2)
    >>> init, step = transforms.make_train_step(loss_fn, scheme, mesh)
    >>> state = init({"a": jnp.ones((16, 8)), "b": jnp.ones((8, 2))})
    >>> state, loss = step(state, jnp.ones((4, 16)))
    >>> float(loss)
    128.0

  References:
    Douillard et al., *Streaming DiLoCo with overlapping communication: Towards
    a Distributed Free Lunch*, arXiv 2501.18512, 2025.
  """
  _shared.refuse_options(
    "streaming_diloco", "local_updates", ("outer",), options
  )
  core.check_bool("as_coded", as_coded)
  if as_coded and codec != _INT4:
    raise ValueError(
      "`codec` must be left out with `as_coded`, which sends E3M0, got "
      f"{codec!r}."
    )
  outer = _shared.make_nesterov(
    axis_name,
    _E3M0 if as_coded else codec,
    outer_rate,
    outer_momentum,
    "gather" if as_coded else None,
  )
  return transforms.local_updates(
    inner,
    outer,
    every=every,
    fragments=fragments,
    delay=delay,
    mix=mix,
    **options,
  )
