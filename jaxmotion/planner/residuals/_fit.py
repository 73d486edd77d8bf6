"""Public API: `fit_memory`, which fits a step into a memory budget."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmotion import codecs, core, perfmodel, program
from jaxmotion.codecs.extend import check_codec
from jaxmotion.core import PyTree
from jaxmotion.memory import residuals
from jaxmotion.planner import _checks
from jaxmotion.planner.residuals import _plan, _prices, _search, _select
from jaxmotion.transforms.extend import check_trained

OPTIONS = (residuals.offload(), residuals.recompute())


@core.declare(fn=core.function)
def program_memory_bytes(fn: Callable[..., PyTree], *args: PyTree) -> int:
  """Returns the device memory of a function, compiled for JAX's backend.

  Counts arguments, results and temporary buffers. The CPU backend's figure
  holds for what loops save. It says nothing of residuals outside loops, nor of
  host memory.

  Args:
    fn: the function.
    *args: its arguments: pytrees of arrays or of `jax.ShapeDtypeStruct`s.

  Example:
    >>> x = jax.ShapeDtypeStruct((256, 256), "float32")
    >>> program_memory_bytes(lambda x: x + 1, x)
    524288
  """
  core.arrays("args", args)
  _checks.check_call(("fn", "args", "args"), lambda args: fn(*args), args, ())
  compiled = jax.jit(fn).lower(*args).compile()
  return program.device_bytes(compiled.memory_analysis())


def _check_action(name: str, option: Any) -> Any:
  """Returns a codec, `offload(...)`, `recompute()` or None, or raises."""
  kinds = (codecs.Codec, residuals.offload, residuals.recompute, type(None))
  noun = "codecs, `offload(...)`, `recompute()` or None"
  core.instance(kinds, noun)("options", option)
  codec: Any = option.codec if isinstance(option, residuals.offload) else option
  if isinstance(codec, codecs.Codec):
    check_codec(name, codec, stateless=True)
  return option


@core.declare(
  fn=core.function,
  budget_bytes=core.measured(core.number(0, 1e18, open_low=True)),
  options=core.sequence("actions", _check_action),
  has_aux=core.boolean,
  measure_memory=core.optional(core.function),
  progress=core.optional(core.function),
  time_limit_s=core.optional(core.measured(core.number(0, 1e9, open_low=True))),
  **_checks.PROBLEM,
)
def fit_memory(
  fn: Callable[..., Any],
  params: PyTree,
  batch: tuple[Any, ...],
  platform: perfmodel.Platform,
  budget_bytes: float,
  *,
  options: Sequence[residuals.Action] = OPTIONS,
  has_aux: bool = False,
  optimizer: optax.GradientTransformation | None = None,
  measure_memory: _select.MeasureMemory | None = program_memory_bytes,
  progress: Callable[[str], object] | None = None,
  time_limit_s: float | None = None,
) -> _plan.MemoryPlan:
  r"""Chooses how to save residuals so that a step fits into memory.

  The plan has the least predicted seconds of all that fit:

  * the function as it is;
  * `jax.checkpoint` by each stock policy, of the whole function and of the
    bodies of its loops, names of `checkpoint_name` included. Policies that save
    on the host are tried where `options` has an `offload`;
  * `memory.compress_residuals` by many budgets, by names, and without single
    residuals;
  * likewise with residuals encoded or on the host, all or some.

  Each is priced in the same way. The step, `jax.value_and_grad` of the wrapped
  function, is traced, and `perfmodel.predict_cost` says its seconds and the
  bytes that are alive at once. To the seconds are added those of a link to the
  host which do not hide behind the layer that saves the residual:

  .. math::
    t + \sum_l \max(0, p_l - f_l) + \max(0, q_l - b_l)

  `t` is the roofline of the step. A layer `l` is the body of a loop, or
  everything outside loops. Its link to the host takes `p` seconds and hides
  behind a forward pass of `f` seconds. Its link back takes `q` and hides behind
  a backward pass of `b`.

  The fastest that is predicted to fit is compiled. If the compiler needs more
  memory than predicted, or less, that corrects the other predictions, and the
  choice may move. Nothing is run.

  Prices are kept for another budget of the same function: the next call with
  the same `fn` and all else equal takes less time.

  Args:
    fn: function `fn(params, *batch)` that returns a scalar: any JAX function.
    params: pytree of arrays or of `jax.ShapeDtypeStruct`s.
    batch: tuple of the arguments after `params`: pytrees of arrays or of
      `jax.ShapeDtypeStruct`s.
    platform: device that the step will run on, and its links to the host.
    budget_bytes: budget of all device memory: arguments, gradients, residuals,
      temporary buffers, and the state of `optimizer`.
    options: what may be done besides keeping: codecs without state,
      `offload(...)`s and `recompute()`. Codecs that round change gradients.
      Without `recompute()`, nothing but what is free is recomputed.
    has_aux: whether `fn` returns a pair, the scalar and other results, as in
      `jax.value_and_grad`.
    optimizer: optimizer whose state is in memory during the step; None has
      none. Leaves that it keeps in host memory do not count.
    measure_memory: function `measure_memory(step, params, *batch)` that
      compiles a step and returns the bytes of device memory that it takes;
      None trusts the prediction. So does the default on a CPU, of functions
      without loops.
    progress: function of a line of text that says what is tried, such as
      `print`.
    time_limit_s: seconds after which nothing further is tried once a plan fits;
      None has no limit. The plan may then depend on the machine's speed.

  Returns:
    The plan; `plan.wrap(fn)` saves its residuals by the plan.

  Raises:
    BudgetTooSmallError: no plan meets the budget (a ValueError with
      `least_bytes`).
    TypeError: `platform` is no platform, `batch` is no tuple, an option is no
      action, or `optimizer` is no optax transformation.
    ValueError: the budget is not positive. The function does not return a
      scalar (with `has_aux` a pair), or has side effects. A codec has state, or
      the device has no rate for a matmul's dtype.

  Example:
    >>> from jaxmotion.perfmodel import builtin_platform
    >>> def loss(params, x):
    ...   def layer(x, w):
    ...     return x + jnp.tanh(jnp.tanh(x @ w) @ w.T), None
    ...   return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)
    >>> w = jax.ShapeDtypeStruct((8, 64, 64), "float32")
    >>> x = jax.ShapeDtypeStruct((256, 64), "float32")
    >>> plan = fit_memory(loss, w, (x,), builtin_platform("h100_node"), 1.5e6)
    >>> plan.compiled_bytes <= 1.5e6, plan.name
    (True, 'jax.checkpoint of loop bodies')

  References:
    Liu et al., Layup: layer-adaptive and multi-type intermediate-oriented
    memory optimization for GPU-based CNNs, 2019. It has a rule for each type of
    layer, here a cost for each array. Jain et al., Checkmate: breaking the
    memory wall with optimal tensor rematerialization, 2020.
  """
  _checks.check_call(("fn", "params", "batch"), fn, params, batch)
  check_trained(params)
  args = jax.tree.map(_abstract_array, (params, *batch))
  _check_result(fn, args, has_aux)
  backend, source = "", "by `measure_memory`"
  if measure_memory is program_memory_bytes:
    backend = jax.default_backend()
    source = f"compiled for {backend}"
  missing_host = _explain_missing_host(platform, backend)
  notes: tuple[str, ...] = ()
  if missing_host and any(isinstance(o, residuals.offload) for o in options):
    options = tuple(o for o in options if not isinstance(o, residuals.offload))
    notes = (f"Nothing is offloaded: {missing_host}.",)
  state_bytes = 0
  if optimizer is not None:
    state_bytes = core.count_device_bytes(optimizer.init, args[0])
  search = _find_search(fn, args, platform, options, has_aux, state_bytes)
  search.begin(progress or (lambda line: None), time_limit_s)
  if backend == "cpu" and not search.prices.landmarks.has_loops:
    measure_memory = None
    notes += ("A CPU's figure says nothing of functions without loops.",)
  return _select.select_fastest(
    search, budget_bytes, measure_memory, notes, source
  )


# The last search and its problem, for other budgets of the same function.
_LAST_SEARCH: list[tuple[Any, _search.RecipeSearch]] = []


def _find_search(
  fn: Callable[..., Any],
  args: Sequence[PyTree],
  platform: perfmodel.Platform,
  options: Sequence[residuals.Action],
  has_aux: bool,
  state_bytes: int,
) -> _search.RecipeSearch:
  """Returns the search of a problem, as far as an earlier call has done it."""
  leaves, tree = jax.tree.flatten(args)
  problem = leaves, tree, platform, options, has_aux, state_bytes
  for (known, its_problem), search in _LAST_SEARCH:
    if known is fn and its_problem == problem:
      return search
  prices = _prices.StepPrices(fn, args, platform, has_aux, state_bytes)
  actions = [
    o for o in options if not (o is None or isinstance(o, residuals.recompute))
  ]
  may_recompute = any(isinstance(o, residuals.recompute) for o in options)
  search = _search.RecipeSearch(prices, actions, may_recompute)
  _LAST_SEARCH[:] = [((fn, problem), search)]
  return search


def _abstract_array(x: Any) -> jax.ShapeDtypeStruct:
  """Returns shape and dtype of a leaf, without its sharding."""
  aval = jax.typeof(x)  # Of a Python number, too.
  return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _explain_missing_host(platform: perfmodel.Platform, backend: str) -> str:
  """Says why nothing can be offloaded, or nothing if something can."""
  if platform.to_host is None or platform.from_host is None:
    return f"`platform` {platform.name!r} has no link to a host"
  if backend == "cpu":
    return (
      "the CPU backend, which the step was compiled for, has no other memory "
      "(`measure_memory` may be a compiler for the platform)"
    )
  return ""


def _check_result(
  fn: Callable[..., Any], args: Sequence[PyTree], has_aux: bool
) -> None:
  """Raises unless a function returns a scalar, or a pair with `has_aux`."""
  result = jax.eval_shape(fn, *args)
  if has_aux:
    if not isinstance(result, tuple) or len(result) != 2:
      raise ValueError(
        "`fn` must return a pair, the loss and other results, since `has_aux` "
        f"is True, got {type(result).__name__}."
      )
    result = result[0]
  leaves = jax.tree.leaves(result)
  if (
    len(leaves) != 1
    or leaves[0].shape
    or not jnp.issubdtype(leaves[0].dtype, jnp.floating)
  ):
    shown = ", ".join(map(core.shape_string, leaves))
    hint = "" if has_aux else " Pass `has_aux=True` if it returns more."
    raise ValueError(
      f"`fn` must return a floating-point scalar, got ({shown}).{hint}"
    )
