"""Which codec, where, and when to compress nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from jaxmotion.codecs import (
  Codec,
  cast,
  feedback,
  identity,
  sign,
  topk,
  uniform,
)
from jaxmotion.core import (
  PyTree,
  check_choice,
  check_int,
  named_leaves,
  shape_string,
)
from jaxmotion.perfmodel import (
  Platform,
  StepCost,
  collective_traffic,
  trace_step,
)
from jaxmotion.planner._checks import check_batch, check_platform
from jaxmotion.planner.exchange._buckets import Route
from jaxmotion.planner.exchange._errors import measured, stated
from jaxmotion.planner.exchange._plan import ExchangePlan
from jaxmotion.planner.exchange._problem import ExchangeProblem
from jaxmotion.planner.exchange._solve import solve

CANDIDATES: tuple[Codec, ...] = (
  cast("bfloat16"),
  uniform(bits=8),
  feedback(uniform(bits=4)),
  feedback(uniform(bits=2)),
  feedback(sign()),
  feedback(topk(density=0.01)),
)
"""What `advise` chooses from, besides full precision."""


def advise(
  loss_fn: Callable[..., Any] | StepCost,
  params: PyTree,
  batch: tuple[Any, ...],
  platform: Platform,
  *,
  accuracy_budget: float = 0.1,
  gradients: PyTree | None = None,
  candidates: Sequence[Codec] = CANDIDATES,
  optimizer: optax.GradientTransformation | None = None,
  mesh_axis: str | None = None,
  local_axis: str | None = None,
  bucket_bytes: int | None = None,
  overlap: bool = True,
  algorithm: str = "ring",
  while_trips: int | Mapping[str, int] | None = None,
  branch_shares: Sequence[float] | None = None,
) -> ExchangePlan:
  r"""Says which codec each tensor's gradient should travel by, if any.

  Of all choices of a codec `c_i` for each tensor with gradient `g_i`, that of
  the shortest step that `perfmodel.predict_step` predicts, such that

  .. math::
    \sum_i \|decode(encode(g_i)) - g_i\|^2 \le
    \text{budget}^2 \sum_i \|g_i\|^2

  Errors are those of one encoding with empty error memory, of one worker.
  Without gradients each tensor has to fit by what its codec states of any
  array.

  Args:
    loss_fn: `loss_fn(params, *batch)`, a scalar: any JAX function. Or the
      `perfmodel.StepCost` that was traced of one.
    params: pytree of arrays or ShapeDtypeStructs.
    batch: tuple of the arguments after `params`, one worker's part: pytrees
      of arrays or ShapeDtypeStructs. Empty with a `StepCost`.
    platform: devices and links.
    accuracy_budget: greatest relative error of the gradient, from 0 to 1.
    gradients: of one step of one worker; errors are measured on them.
    candidates: codecs of arrays to choose from. Full precision always is one.
    optimizer: of the update; None is SGD without momentum.
    mesh_axis: of the workers, or of the hosts; None is the only one there is.
    local_axis: the axis of the devices of one host, if they reduce first.
    bucket_bytes: as for `perfmodel.predict_step`; None is what
      `jaxmotion.exchange` does.
    overlap: whether links and devices work at once.
    algorithm: of the collectives, as for `perfmodel.collective_traffic`.
    while_trips: as for `perfmodel.predict_cost`.
    branch_shares: as for `perfmodel.predict_cost`.

  Returns:
    The plan: `jaxmotion.exchange(mesh_axis, plan.codec, method=plan.method)`.

  Raises:
    TypeError: a platform or a candidate that is none, a batch that is no
      tuple, a tensor that is not floating-point.
    ValueError: no parameters, an axis that the platform has not, a budget
      out of range, a while loop without trips (it is named), a dtype that
      the platform has no rate for, a codec without a bound and no gradients,
      gradients that are not those of the parameters, or not finite.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion import perfmodel
    >>> def loss(layers, x):
    ...   for w in layers:
    ...     x = jax.nn.relu(x @ w)
    ...   return jnp.mean(x)
    >>> layers = 3 * [jax.ShapeDtypeStruct((1024, 1024), "float32")]
    >>> x = jax.ShapeDtypeStruct((64, 1024), "float32")
    >>> plan = advise(
    ...   loss, layers, (x,), perfmodel.builtin_platform("ethernet_1gbit")
    ... )
    >>> plan.codec
    uniform(bits=8, block=512, symmetric=True, rounding='nearest')
    >>> plan = advise(
    ...   loss, layers, (x,), perfmodel.builtin_platform("h100_node")
    ... )
    >>> plan.codec, plan.reason[:15]
    (identity(), 'Do not compress')

  References:
    Markov et al., L-GreCo: layerwise-adaptive gradient compression, 2022
    (dynamic programming under a budget of error, for the fewest bytes);
    Wang et al., Espresso, 2023 (encoding delays the gradients that follow).
  """
  check_platform(platform)
  check_batch(batch)
  _check_budget(accuracy_budget)
  mesh_axis = _check_axes(platform, mesh_axis, local_axis)
  collective_traffic(
    "all_reduce", 0.0, 1, algorithm=algorithm
  )  # Raises if unknown.
  codecs = _check_candidates(candidates)
  if not jax.tree.leaves(params):
    raise ValueError("`params` must hold at least one array, got none.")
  if bucket_bytes is not None:
    check_int("bucket_bytes", bucket_bytes, 1)
  if isinstance(loss_fn, StepCost):
    _check_same(loss_fn, params, batch)
    own = loss_fn
  else:
    own = trace_step(
      loss_fn,
      params,
      batch,
      optimizer=optimizer,
      while_trips=while_trips,
      branch_shares=branch_shares,
    )
  errors = (
    stated(own.params, codecs)
    if gradients is None
    else measured(own.params, codecs, gradients)
  )
  route = Route(
    platform, mesh_axis, local_axis, bucket_bytes, overlap, algorithm
  )
  return solve(ExchangeProblem(own, route, codecs, accuracy_budget, errors))


def _check_budget(value: Any) -> None:
  message = f"`accuracy_budget` must be a number in [0, 1], got {value!r}."
  if type(value) not in (int, float):
    raise TypeError(message)
  if not 0 <= value <= 1:
    raise ValueError(message)


def _check_axes(
  platform: Platform, mesh_axis: str | None, local_axis: str | None
) -> str:
  names = [axis.name for axis in platform.axes]
  if mesh_axis is None and len(names) == 1:
    mesh_axis = names[0]
  check_choice("mesh_axis", mesh_axis, names)
  check_choice(
    "local_axis", local_axis, [None, *(n for n in names if n != mesh_axis)]
  )
  assert mesh_axis is not None
  return mesh_axis


def _check_candidates(candidates: Sequence[Codec]) -> tuple[Codec, ...]:
  for codec in candidates:
    if not isinstance(codec, Codec) or codec.is_tree:
      raise TypeError(f"`candidates` must be codecs of arrays, got {codec!r}.")
  return tuple(dict.fromkeys((identity(), *candidates)))


def _check_same(own: StepCost, params: PyTree, batch: Sequence[Any]) -> None:
  if batch:
    raise ValueError(
      f"`batch` must be empty where the step is traced, got {len(batch)}."
    )
  theirs, given = (
    {path: shape_string(leaf) for path, leaf in named_leaves(tree)}
    for tree in (own.params, params)
  )
  if theirs != given:
    raise ValueError(
      f"`params` must be those of the traced step, {theirs}, got {given}."
    )
