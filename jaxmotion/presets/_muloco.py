"""Preset `muloco`: local updates by Muon, exchanged in two bits."""

from typing import Any

import jax
import optax
from jax.sharding import AxisType

from jaxmotion import codecs, transforms
from jaxmotion.core import AxisName, PyTree
from jaxmotion.presets import _shared

_INT2 = codecs.feedback(codecs.uniform(bits=2))


def muloco(
  learning_rate: optax.ScalarOrSchedule,
  *,
  weight_decay: float = 0.0,
  every: int = 30,
  outer_rate: float = 0.7,
  outer_momentum: float = 0.9,
  codec: codecs.Codec | None = _INT2,
  axis_name: AxisName = "data",
  **options: Any,
) -> transforms.Scheme:
  """Makes the scheme `local_updates` with Muon inside and 2 bits outside.

  Muon's changes of a matrix have equal singular values, which few bits keep
  better than those of AdamW. Leaves that are no matrices take AdamW, as in
  `optax.contrib.muon`.

  Ours differs from the paper thus. Levels are evenly spaced for blocks of
  elements. The outer rate and momentum are DiLoCo's; the paper tunes them.

  Args:
    learning_rate: of Muon, a number or a schedule of the worker's steps.
    weight_decay: of the inner optimizer.
    every: number of steps between two exchanges.
    outer_rate: learning rate of the outer optimizer.
    outer_momentum: its momentum, in [0, 1).
    codec: codec of what workers have changed; None is full precision.
    axis_name: the workers' axis, or `HostAxes`.
    **options: other arguments of `local_updates`, such as `fragments`.

  Returns:
    A scheme for `make_train_step`, as from `local_updates`.

  Raises:
    TypeError: an option that the preset sets.
    TypeError, ValueError: as `local_updates` and `exchange`.
    ValueError: explicit axes of the model, which Muon cannot be traced on.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> init, step = transforms.make_train_step(
    ...   lambda w, x: jnp.mean(x @ w), muloco(0.02, every=2), mesh
    ... )
    >>> state = init(jnp.ones((16, 8)))
    >>> state, loss = step(state, jnp.ones((4, 16)))
    >>> float(loss)
    16.0

  References:
    Thérien, Huang, Rish and Belilovsky, *MuLoCo: Muon is a practical inner
    optimizer for DiLoCo*, arXiv 2505.23725, 2025.
  """
  _shared.refuse_options("muloco", "local_updates", ("inner", "outer"), options)
  _shared.check_rate("learning_rate", learning_rate)
  _shared.check_rate("weight_decay", weight_decay, schedule=False)
  muon = optax.contrib.muon(
    learning_rate, weight_decay=weight_decay, adam_weight_decay=weight_decay
  )

  def init(params: PyTree) -> optax.OptState:
    types = jax.sharding.get_abstract_mesh().axis_types
    if AxisType.Explicit in types:
      raise ValueError(
        "`mesh` must have Auto axes of the model, because Muon multiplies "
        "matrices whose shards explicit axes do not join, got "
        f"{types}: give jax.make_mesh axis_types=(AxisType.Auto, ...), "
        "or take `diloco`."
      )
    return muon.init(params)

  inner = optax.GradientTransformation(init, muon.update)
  outer = _shared.make_nesterov(axis_name, codec, outer_rate, outer_momentum)
  return transforms.local_updates(inner, outer, every=every, **options)
