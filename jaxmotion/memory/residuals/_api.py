"""Public functions of residuals."""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jaxmotion import codecs, core, perfmodel
from jaxmotion.core import Array, PyTree
from jaxmotion.memory.residuals import _arguments, _traced, choose, run

# Capacity of `zero_value` beyond the largest measured share of nonzeros.
_HEADROOM = 0.05


@core.declare(fn=core.function, count_overflows=core.boolean)
def compress_residuals(
  fn: Callable[..., PyTree],
  codec: choose.Action | choose.ResidualRules | choose.ResidualChoice = None,
  *,
  params: int | Sequence[int] = 0,
  memory_budget: float | None = None,
  device: perfmodel.Device | None = None,
  count_overflows: bool = False,
  static_argnums: int | Sequence[int] = (),
) -> Callable[..., PyTree]:
  """Returns a function that saves fewer bytes for its backward pass.

  Its result is that of `fn`, bit for bit. Which residuals are saved is chosen
  by a minimum cut of the function traced together with its backward pass. Each
  value is either saved or recomputed. To save it takes bytes and the time to
  write and read them; to recompute it takes the time of the operations in
  between. A loop is never run again, since its body has a choice of its own.

  Each residual is encoded after its last use in the forward pass and decoded
  when the backward pass first needs it. Barriers hold the compiler to that
  order. Bodies of `lax.scan` are treated the same way. Max pooling saves the
  argmax of each window, in 1 to 8 bits, instead of its operand.

  Without a codec nothing is rounded: the gradients are those of `fn`, bit for
  bit. Only where XLA fuses differently, it adds in another order. With a codec
  that rounds, masks and other results of comparisons are saved as bits where
  they would otherwise be recomputed from rounded values alone.

  Leaves of the arguments and of the result that are no arrays pass as they are.

  Wrap a block of several layers, or the whole loss. Arguments other than
  `params` may be saved. To offload from a loop, wrap what holds the loop
  rather than its body: the buffers of one iteration then travel while other
  iterations compute.

  `jax.debug.print`, `jax.debug.callback` and `checkify.check` run in the pass
  in which they stand, and again in a `cond` that is recomputed.

  Arguments may be sharded over the devices of a mesh. Axes of kind `Explicit`
  are in the types of arrays: each device encodes its own shard. With axes of
  kind `Auto`, dimensions are cut into parts that fit any sharding of theirs. No
  codec then moves a residual to another device; in a loop XLA may, if the
  weights of an `Auto` mesh are sharded along the axes of the batch. Counting
  the overflows of `zero_value` adds one number.

  Args:
    fn: function of trees that is differentiated once, in reverse mode.
      All of its floating-point arguments must have a gradient, wanted or not.
      Keyword arguments are passed on and not differentiated.
    codec: how residuals are saved. One of:

      * None: exactly, with masks as bits.
      * A codec: encodes dense and sparse floats of 2048 elements or more where
        that makes them smaller; others are saved exactly. So are floats that
        the backward pass divides by, if the codec may round them to zero:
        gradients would be infinite. `zero_value`
        encodes sparse floats alone, and exactly: a residual whose nonzeros
        exceed the capacity is recomputed.
      * `offload(codec)`: encoded likewise, and saved in host memory.
      * `recompute()`: not saved but recomputed.
      * Pairs of a regular expression and one of these: the first pattern that
        is found in a residual's name decides; see `residuals_of`.
      * A function of a `Residual` that returns one of these.
    params: positions of arguments that stay in memory for the whole step
      anyway (the parameters). They are never saved as residuals; neither are
      arrays that `fn` closes over.
    memory_budget: most bytes of residuals on the device. Up to 1, a share of
      the bytes that the fastest step saves, in the function and in each of its
      loops; above 1, bytes of all of them together. The choice is the fastest
      that keeps to it. 0 saves the fewest bytes from which everything else can
      be recomputed, or 1 % more where that is faster: mostly the arguments, as
      `jax.checkpoint` does; of layers that are written out, also their inputs,
      so that they are recomputed one after the other. Inputs without a
      gradient count as 15/16 of their bytes. None recomputes what is nearly
      free: what adds at most 1 % to the predicted time. A function without
      loops whose results are small is left plain where that is predicted to
      hold no more.
    device: device whose times are predicted; None for an H100.
    count_overflows: whether to return `(result, overflows)`, the second being
      the number of residuals that exceeded their capacity, int32[]; 0 where
      nothing is differentiated.
    static_argnums: positions of arguments whose values the trace sees, such as
      flags, as of `jax.checkpoint`. Leaves that are no arrays, such as strings
      and functions in a module, need not be named: they are seen anyway.

  Returns:
    A function with the arguments of `fn`. Forward-mode differentiation of it
    is a TypeError of JAX, second derivatives are a NotImplementedError.

  Raises:
    TypeError: `fn` is a class; or `codec` is none of these, or does not take an
      array that it was chosen for.
    ValueError: `fn` has side effects, or no gradient in reverse mode with
      respect to one of its floating-point arguments; `params` are not positions
      of arguments; a rule matches no residual; or a codec has state.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion import codecs
    >>> def loss(w, x):
    ...   return jnp.sum(jnp.tanh(x @ w) ** 2)
    >>> w, x = jnp.eye(64), jnp.ones((64, 64))
    >>> compressed = compress_residuals(loss, codecs.uniform(bits=8))
    >>> bool(compressed(w, x) == loss(w, x))
    True
    >>> exact = jax.jit(jax.grad(loss))(w, x)
    >>> rounded = jax.jit(jax.grad(compressed))(w, x)
    >>> bool(jnp.allclose(exact, rounded, 0.02))
    True

  References:
    Jin et al., *Layrub: layer-centric GPU memory reuse and data migration in
    extreme-scale deep learning systems*, 2018. Rhu et al., *Compressing DMA
    Engine*, 2018. Jain et al., *Gist: efficient data encoding for deep neural
    network training*, 2018. Chen et al., *ActNN*, 2021.
  """
  if isinstance(fn, type):
    raise TypeError(
      f"`fn` must be a function of arrays, got the class {fn.__name__}. For a "
      "module of Flax Linen there is `jaxmotion.linen.compress_residuals`."
    )
  _arguments.check_params(params)
  options = choose.make_options(codec, memory_budget, device)
  positions: Any = static_argnums
  if not isinstance(positions, list | tuple | range):
    positions = (positions,)
  for position in positions:
    core.integer(-(2**31), 2**31 - 1)("static_argnums", position)

  @functools.wraps(fn)
  def wrapped(*args: PyTree, **kwargs: Any) -> PyTree:
    bound = functools.partial(fn, **kwargs)
    given = _arguments.mark_static(args, tuple(positions))
    traced = _traced.trace_in_budget(bound, given, params, options)
    choose.check_rules(codec, traced.residual_names)
    result, notes = traced(traced.given.take_arrays())
    return (result, notes.overflows) if count_overflows else result

  return wrapped


@core.declare(fn=core.function)
def residuals_of(
  fn: Callable[..., PyTree],
  *args: PyTree,
  codec: choose.Action | choose.ResidualRules | choose.ResidualChoice = None,
  params: int | Sequence[int] = 0,
  memory_budget: float | None = None,
  device: perfmodel.Device | None = None,
) -> list[choose.Residual]:
  """Lists the residuals that a compressed function would save.

  Nothing is computed: the arguments may be shapes.

  Args:
    fn: function of arrays, as `compress_residuals` takes.
    *args: arguments of the function, arrays or shapes.
    codec: how residuals are saved, in any form that `compress_residuals` takes.
    params: positions of arguments that stay in memory anyway.
    memory_budget: most bytes of residuals; see `compress_residuals`.
    device: device whose times are predicted; see `compress_residuals`.

  Returns:
    A `Residual` for each array: its name, its bytes (`nbytes`), the bytes of
    its encoded buffers (`encoded_bytes`) and how often it is saved
    (`repeats`). A name is "kind/label". Kinds are "mask" (booleans),
    "integer", "sparse" (floats that ReLU made, or an operation that preserves
    its zeros), "dense" (other floats) and "other". Labels are those of
    `checkpoint_name`, paths of arguments, or the primitive and its number; in
    loops they start with "scan_0/".

  Example:
    >>> import jax.numpy as jnp
    >>> def loss(w, x):
    ...   return jnp.sum(jax.nn.relu(x @ w[0]) @ w[1])
    >>> w, x = jnp.ones((2, 64, 64)), jnp.ones((32, 64))
    >>> [(r.name, r.encoded_bytes) for r in residuals_of(loss, w, x)]
    [('dense/1', 8192), ('sparse/custom_jvp_call_0', 8192)]
  """
  _arguments.check_params(params)
  options = choose.make_options(codec, memory_budget, device)
  given = _arguments.ArrayLeaves(args)
  saved: list[choose.Residual] = []

  def trace(*arrays: Array) -> None:
    traced = _traced.trace_in_budget(fn, given.fill(arrays), params, options)
    choose.check_rules(codec, traced.residual_names)
    saved.extend(traced.saved_residuals())

  jax.eval_shape(trace, *given.arrays)
  return saved


@core.declare(fn=core.function)
def calibrate_zero_value(
  fn: Callable[..., PyTree],
  batches: Iterable[Sequence[PyTree]],
  *,
  params: int | Sequence[int] = 0,
) -> tuple[tuple[str, choose.Action], ...]:
  """Measures the nonzeros of sparse residuals and sets a capacity for each.

  The capacity is 1.05 times the largest share of nonzeros of any tile of 1024
  elements in any batch. A residual whose capacity would reach 1 gets no rule:
  zero-value coding would not make it smaller.

  Args:
    fn: function of arrays, as `compress_residuals` takes.
    batches: tuples of arguments, one for each run of the function.
    params: positions of the arguments that are always live; see
      `compress_residuals`.

  Returns:
    Pairs of a pattern and a codec, the `codec` of `compress_residuals`. Append
    rules for other residuals.

  Raises:
    TypeError: `fn` is no function, `params` are no positions, or a batch is no
      tuple of arguments.
    ValueError: there are no batches.

  Example:
    >>> import jax.numpy as jnp
    >>> def loss(w, x):
    ...   y = jax.nn.relu(x @ w[0])
    ...   return jnp.sum((y @ w[1]) ** 2)
    >>> w = jnp.stack([-jnp.eye(64), jnp.ones((64, 64))])
    >>> x = jnp.arange(-64.0, 4032).reshape(64, 64)
    >>> rules = calibrate_zero_value(loss, [(w, x)])
    >>> [codec.capacity for _, codec in rules]
    [0.065625]

  References:
    Rhu et al., *Compressing DMA Engine: Leveraging Activation Sparsity for
    Training Deep Neural Networks*, 2018.
  """
  _arguments.check_params(params)
  options = choose.make_options(None)._replace(measure=True)

  @jax.jit
  def measure(*args: PyTree) -> dict[str, Array]:
    traced = _traced.TracedFunction(fn, args, params, options)
    inputs = [*traced.closed_over, *traced.given.arrays]
    (_, notes), _ = run.forward(traced.selection, inputs)
    return notes.fills

  fills: dict[str, float] = {}
  if not isinstance(batches, Iterable) or isinstance(batches, jax.core.Tracer):
    raise TypeError(
      f"`batches` must be an iterable of tuples of arguments, got {batches!r}."
    )
  for args in batches:
    core.sequence("arguments, for each run of `fn`")("batches", args)
    core.arrays("batches", args)
    for name, fill in jax.device_get(measure(*args)).items():
      fills[name] = max(fills.get(name, 0.0), float(fill))
  if not fills:
    raise ValueError(
      "`batches` must hold arguments of a function that saves arrays with "
      "zeros for its backward pass, got none."
    )
  capacity = {name: (1 + _HEADROOM) * fill for name, fill in fills.items()}
  return tuple(
    (f"^{re.escape(name)}$", codecs.zero_value(capacity=max(least, 1e-6)))
    for name, least in capacity.items()
    if least < 1
  )
