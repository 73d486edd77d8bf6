"""Public API: `advise`, which chooses a codec for each tensor's gradient."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from jaxmotion import codecs, core, perfmodel
from jaxmotion.codecs.extend import check_codec
from jaxmotion.core import PyTree
from jaxmotion.planner import _checks
from jaxmotion.planner.exchange import _errors, _plan, _problem, _solve
from jaxmotion.transforms.extend import check_trained

CANDIDATES: tuple[codecs.Codec, ...] = (
  codecs.cast("bfloat16"),
  codecs.uniform(bits=8),
  codecs.feedback(codecs.uniform(bits=4)),
  codecs.feedback(codecs.uniform(bits=2)),
  codecs.feedback(codecs.sign()),
  codecs.feedback(codecs.topk(density=0.01)),
)
"""Codecs that `advise` chooses from by default, besides full precision."""


@core.declare(
  accuracy_budget=core.number(0, 1),
  gradients=core.optional(core.arrays),
  candidates=core.sequence(
    "codecs", functools.partial(check_codec, one_round=True)
  ),
  bucket_bytes=core.optional(core.integer(1, 1 << 62)),
  overlap=core.boolean,
  **_checks.PROBLEM,
)
def advise(
  loss_fn: Callable[..., Any] | perfmodel.StepCost,
  params: PyTree,
  batch: tuple[Any, ...],
  platform: perfmodel.Platform,
  *,
  accuracy_budget: float = 0.1,
  gradients: PyTree | None = None,
  candidates: Sequence[codecs.Codec] = CANDIDATES,
  optimizer: optax.GradientTransformation | None = None,
  mesh_axis: str | core.HostAxes | None = None,
  bucket_bytes: int | None = None,
  overlap: bool = True,
) -> _plan.ExchangePlan:
  r"""Chooses the codec of each tensor's gradient, or full precision.

  The plan assigns a codec `c_i` to each tensor with gradient `g_i`. Its step is
  the shortest that `perfmodel.predict_step` predicts, such that

  .. math::
    \sum_i \|decode(encode(g_i)) - g_i\|^2 \le
    \text{budget}^2 \sum_i \|g_i\|^2

  Errors are those of one encoding by one worker with empty error memory.
  Without `gradients`, each tensor must fit the budget by the bound that its
  codec guarantees for any array.

  Args:
    loss_fn: function `loss_fn(params, *batch)` that returns a scalar: any JAX
      function. Or the `perfmodel.StepCost` traced from one.
    params: pytree of arrays or ShapeDtypeStructs.
    batch: tuple of the arguments after `params`, one worker's part: pytrees
      of arrays or ShapeDtypeStructs. Empty with a `StepCost`.
    platform: devices and links.
    accuracy_budget: greatest relative error of the gradient, from 0 to 1.
    gradients: pytree of one worker's gradients in one step, shaped as
      `params`; errors are measured on them.
    candidates: codecs of arrays to choose from. Full precision is always one.
    optimizer: optimizer of the update; None is SGD without momentum.
    mesh_axis: name of the platform's axis of the workers; None is its only
      axis. With `HostAxes` the devices of a host reduce first.
    bucket_bytes: least bytes of gradients that are exchanged together, as in
      `perfmodel.predict_step`; None is one bucket, as in
      `jaxmotion.exchange`.
    overlap: whether links and devices work at the same time.

  Returns:
    The plan, for `jaxmotion.exchange(mesh_axis, plan.codec,
    method=plan.method)`.

  Raises:
    TypeError: `platform` is no platform, `batch` is no tuple, a candidate is
      no codec of arrays, or a tensor is not floating-point.
    ValueError: `params` is empty, or the budget is out of range. The platform
      does not have the axis, or no rate for a dtype. A while loop has no trips
      (the loop is named): give what `perfmodel.trace_step` traced with them. A
      codec has no error bound and there are no gradients, or the gradients do
      not match the parameters or are not finite.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion import perfmodel
    >>> def loss(layers, x):
    ...   for w in layers:
    ...     x = jax.nn.relu(x @ w)
    ...   return jnp.mean(x)
    >>> layers = 3 * [jax.ShapeDtypeStruct((1024, 1024), "float32")]
    >>> x = jax.ShapeDtypeStruct((64, 1024), "float32")
    >>> ethernet = perfmodel.builtin_platform("ethernet_1gbit")
    >>> plan = advise(loss, layers, (x,), ethernet)
    >>> plan.codec
    uniform(bits=8, block=512, symmetric=True, rounding='nearest')
    >>> nvlink = perfmodel.builtin_platform("h100_node")
    >>> plan = advise(loss, layers, (x,), nvlink)
    >>> plan.codec, plan.reason[:15]
    (identity(), 'Do not compress')

  References:
    Markov et al., L-GreCo: layerwise-adaptive gradient compression, 2022
    (dynamic programming under an error budget, for the fewest bytes). Wang et
    al., Espresso, 2023 (encoding delays the gradients that follow).
  """
  mesh_axis = _check_axes(platform, mesh_axis)
  candidates = tuple(dict.fromkeys((codecs.identity(), *candidates)))
  if not jax.tree.leaves(params):
    raise ValueError("`params` must hold at least one array, got none.")
  if isinstance(loss_fn, perfmodel.StepCost):
    _check_traced_step(loss_fn, params, batch)
    step_cost = loss_fn
  else:
    core.function("loss_fn", loss_fn)
    _checks.check_call(("loss_fn", "params", "batch"), loss_fn, params, batch)
    check_trained(params)
    step_cost = perfmodel.trace_step(
      loss_fn, params, batch, optimizer=optimizer
    )
  errors = (
    _errors.bound_errors(step_cost.params, candidates)
    if gradients is None
    else _errors.measure_errors(step_cost.params, candidates, gradients)
  )
  return _solve.solve_exchange(
    _problem.ExchangeProblem(
      step_cost,
      platform,
      mesh_axis,
      candidates,
      errors,
      accuracy_budget,
      bucket_bytes=bucket_bytes,
      overlap=overlap,
    )
  )


def _check_axes(
  platform: perfmodel.Platform, mesh_axis: str | core.HostAxes | None
) -> str | core.HostAxes:
  """Returns the axes of the workers, which the platform must have."""
  names = [axis.name for axis in platform.axes]
  if mesh_axis is None and len(names) == 1:
    mesh_axis = names[0]
  hosts, devices = core.split_axes(mesh_axis)
  core.choice(names)("mesh_axis", hosts)
  if devices:
    core.choice(names)("mesh_axis", devices)
  assert mesh_axis is not None
  return mesh_axis


def _check_traced_step(
  step_cost: perfmodel.StepCost, params: PyTree, batch: tuple[Any, ...]
) -> None:
  """Raises unless a traced step has these parameters and no other batch."""
  if batch:
    raise ValueError(
      "`batch` must be empty where `loss_fn` is a traced step, got "
      f"{len(batch)} arguments."
    )
  expected, given = (
    {path: core.shape_string(leaf) for path, leaf in core.named_leaves(tree)}
    for tree in (step_cost.params, params)
  )
  if expected != given:
    raise ValueError(
      f"`params` must be those of the traced step, {expected}, got {given}."
    )
