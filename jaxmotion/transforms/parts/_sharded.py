"""Optimizer whose state is sharded over workers, as an optax transformation."""

from typing import Any

import optax

from jaxmotion import codecs, core, hosts
from jaxmotion.codecs.extend import check_codec
from jaxmotion.collectives.extend import (
  NONFINITE_POLICIES,
  check_local_codec,
  check_weight,
)
from jaxmotion.core import AxisName, PyTree
from jaxmotion.transforms import (
  _exchange,
  _model_axes,
  _options,
  _placement,
  _states,
)
from jaxmotion.transforms.parts import _sharded_update


def sharded(
  axis_name: AxisName,
  tx: optax.GradientTransformation | optax.MultiSteps,
  *,
  gradient_codec: codecs.Codec | None = None,
  weight_codec: codecs.Codec | None = None,
  nonfinite: str = "propagate",
  seed: int = 0,
  local_codec: codecs.Codec | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Runs an optimizer on each worker's part of the parameters (ZeRO-1 and 2).

  It takes the place of `optax.chain(exchange(...), tx)`. Worker `j` gets part
  `j` of the mean gradient, updates that part, and all gather the changes:

  .. math::
    g_j &= \frac{1}{N} \sum_r decode(encode(g_{r,j})) \\
    w_j &\leftarrow w_j + tx(g_j, w_j) \\
    p &\leftarrow p + gather_j \; decode(encode(w_j - p_j))

  `p` are the parameters that every worker holds, with the same bits. The master
  `w` and the moments exist once, as arrays of the parameters' shapes that are
  sharded over the axis. What an encoding of `w_j - p_j` leaves out is part of
  the next difference, so `p` follows `w` without error memory.

  Without a `weight_codec` there is no master: updates travel at full precision
  and the result is that of the optimizer on every worker.

  A leaf is cut along the dimension that needs the least padding to be divided
  by the workers, the first of several. State of a padded leaf has the padded
  shape. Leaves of fewer than 64 elements per worker stay whole: their gradients
  are averaged through `gradient_codec`, and all workers update them alike.

  Args:
    axis_name: the workers' axis, or a tuple of axes. With `HostAxes` gradients
      are reduced within a host first, and a payload crosses to another host
      once. Give the same `HostAxes` to `make_train_step`, `init_state` and
      `state_specs`.
    tx: transformation that treats every element by itself, such as
      `optax.adamw`. `clip_by_global_norm` clips inside of it; that of optax
      would see the norm of a part. `testing.check_sharded` finds others that
      look across elements.
    gradient_codec: codec of the gradients' parts; None is full precision.
    weight_codec: codec of the differences; None is full precision without a
      master. It must be without state.
    nonfinite: policy for gradients, and weights, that are not finite on some
      worker: "propagate", "skip" (all workers agree to emit zeros and to keep
      moments, master and error memory as they were) or "zero".
    seed: seed of stochastic rounding and sampling, in [0, 2^32).
    local_codec: codec of gradients within a host; None is full precision.

  Returns:
    A transformation whose `init` and `update` run inside `shard_map`;
    `make_train_step` and `init_state` run them there. `update` needs the
    parameters and also takes `weight=`, this worker's scalar weight in the
    mean. Nothing may come after it in a chain.

  Raises:
    TypeError: an argument of another type.
    ValueError: `seed` is outside [0, 2^32), or `nonfinite` is unknown. A codec
      joins leaves, `weight_codec` or `local_codec` has state, or feedback has
      the global form. `local_codec` is given without hosts. `update` raises it
      for a gradient that JAX has summed already and for the state of another
      number of workers.

  Example:
    >>> from jaxmotion import codecs
    >>> tx = sharded(
    ...   "data",
    ...   optax.adamw(3e-4),
    ...   gradient_codec=codecs.uniform(bits=8),
    ...   weight_codec=codecs.uniform(bits=4),
    ... )

  References:
    Rajbhandari et al., *ZeRO*, 2019; Jia et al., *SDP4Bit*, 2024 (differences
    of weights, two hops).
  """
  workers = core.flatten_axes("axis_name", axis_name)
  tx = _placement.as_transformation(tx)
  core.check_choice("nonfinite", nonfinite, NONFINITE_POLICIES)
  core.check_int("seed", seed, 0, 2**32 - 1)
  for name, codec in (
    ("gradient_codec", gradient_codec),
    ("weight_codec", weight_codec),
    ("local_codec", local_codec),
  ):
    if codec is not None:
      check_codec(name, codec, trees=True)
  check_local_codec(axis_name, local_codec)
  one = _sharded_update.ShardedUpdate(
    axis_name,
    workers,
    optax.with_extra_args_support(tx),
    codecs.identity() if gradient_codec is None else gradient_codec,
    weight_codec,
    local_codec,
    nonfinite,
    seed,
  )
  # Every leaf is encoded by itself, so no codec joins some.
  init_mapped, update_mapped = _model_axes.map_model_axes(
    one.init, one.update, one.workers, ()
  )

  def make_state(params: PyTree, specs: PyTree | None) -> _states.ShardedState:
    state = init_mapped(params, specs)
    return _options.note_options(state, options, params, specs)

  def init_fn(params: PyTree) -> _states.ShardedState:
    core.check_arrays("params", params, numbers=False)
    return make_state(params, None)

  options = _options.ShardedOptions(
    axis_name=core.comparable_axes(axis_name),
    gradient_codec=one.gradient_codec,
    weight_codec=weight_codec,
    tx=tx,
    init=make_state,
  )

  def update_fn(
    updates: PyTree,
    state: _states.ShardedState,
    params: PyTree | None = None,
    *,
    weight: Any = None,
    sending: hosts.Sending | None = None,
    **extra_args: Any,
  ) -> tuple[PyTree, _states.ShardedState]:
    core.check_arrays("updates", updates, numbers=False)
    core.check_arrays("params", params, numbers=False)
    _exchange.check_options(state, _states.ShardedState, options)
    check_weight(weight)
    if params is None:
      raise ValueError(
        "`params` must be given to `update` of `sharded`, got None."
      )
    core.check_like("updates", updates, params, "`params`")
    sending = hosts.check_sending(sending)
    args = {**extra_args, "weight": weight, "sending": sending}
    made_for = state.made_for
    state = state._replace(made_for=None)
    updates, state = update_mapped(updates, state, params, args, made_for.specs)
    return updates, state._replace(made_for=made_for)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
