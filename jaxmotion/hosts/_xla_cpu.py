"""Values that XLA:CPU writes to memory, updates in place, or orders.

XLA:CPU removes optimization barriers before it fuses and joins operations. So
calls, loops and data dependencies say what barriers say to other backends.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from jaxmotion import core
from jaxmotion.core import Array, PyTree

RUN_ONCE = "run_once"
"""Name of the body of a loop that has one trip, for any arguments."""


def choose_by_platform(
  *args: PyTree,
  cpu: Callable[..., PyTree],
  default: Callable[..., PyTree],
) -> PyTree:
  """Runs one function on CPU, and another one on other platforms."""
  # Both are traced only where the program may run on either. A function that
  # encodes takes 10 ms to trace.
  platforms = core.list_platforms()
  if "cpu" not in platforms:
    return default(*args)
  if len(platforms) == 1:
    return cpu(*args)
  return lax.platform_dependent(*args, cpu=cpu, default=default)


def write_apart(fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
  """Returns `fn(*args)`, on CPU written to memory before anything reads it."""
  return make_apart(fn)(*args)


def make_apart(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
  """Returns `fn`, whose results are on CPU written to memory.

  It is traced once for all arguments of the same types.
  """
  # XLA:CPU fuses a cheap expression into its readers and computes it in the
  # shape of the reader. Where that shape makes it divide an index once an
  # element, one pass more is faster. Optimization barriers are removed before
  # fusion, so on CPU this is a call that may not be inlined. On other backends
  # it is a plain call.

  def inline_inner(*args: PyTree) -> PyTree:
    # `jnp.where` is a call, too, and would otherwise be written apart as well.
    with set_xla_metadata(inlineable="true"):
      return fn(*args)

  jitted = jax.jit(inline_inner)

  def call(*args: PyTree) -> PyTree:
    # Also where `trace_in_place` leaves out all other calls.
    with set_xla_metadata(inlineable="false"), jax.disable_jit(False):
      return jitted(*args)

  return functools.partial(choose_by_platform, cpu=call, default=fn)


def take_apart(
  take: Callable[[PyTree, Any, Any, int], PyTree],
  sizes: Sequence[tuple[Any, int]],
  source: PyTree,
) -> list[PyTree]:
  """Returns `take(source, start, kind, size)` of consecutive ranges."""
  # XLA:CPU compiles a loop anew for each place that it reads at. So on CPU
  # places are computed at run time, and ranges of a kind are compiled once.
  # sizes: the kind of each range, which is hashable, and its size.

  def take_at_runtime(source: PyTree) -> list[PyTree]:
    start, pieces = _hidden_zero(jax.tree.leaves(source)[0]), []
    for own in sizes:
      piece, start = takers[own](source, start)
      pieces.append(piece)
    return pieces

  def take_at_once(source: PyTree) -> list[PyTree]:
    starts = itertools.accumulate([size for _, size in sizes], initial=0)
    pairs = zip(sizes, starts, strict=False)
    return [take(source, start, *own) for own, start in pairs]

  def take_and_step(kind: Any, size: int, source: PyTree, start: Array) -> Any:
    return take(source, start, kind, size), start + size

  takers = {
    own: make_apart(functools.partial(take_and_step, *own)) for own in sizes
  }
  is_whole = len(sizes) == 1 or not all(a.size for a in jax.tree.leaves(source))
  return choose_by_platform(
    source,
    cpu=take_at_once if is_whole else take_at_runtime,
    default=take_at_once,
  )


def stack_apart(trees: Sequence[PyTree]) -> PyTree:
  """Returns several trees as one, with an axis of trees if there are many."""
  if len(trees) == 1:
    return trees[0]
  stack_all = lambda *trees: jax.tree.map(lambda *a: jnp.stack(a), *trees)
  return write_apart(stack_all, *trees)


def unstack_apart(stacked: PyTree, likes: Sequence[PyTree]) -> list[PyTree]:
  """Returns the trees of a stack, typed as varying like others."""
  trees = [stacked] * len(likes)
  if len(likes) > 1 and jax.tree.leaves(stacked):
    # Readers of equal shapes are compiled once, unless each reads another row.
    pick = lambda a, start: lax.squeeze(slice_at(a, start, 1), (0,))
    take = lambda tree, start, *_: jax.tree.map(lambda a: pick(a, start), tree)
    trees = take_apart(take, [(None, 1)] * len(likes), stacked)
  restore = functools.partial(jax.tree.map, core.restore_varying)
  return [restore(*pair) for pair in zip(trees, likes, strict=True)]


def slice_at(x: Array, start: Any, size: int, axis: int = 0) -> Array:
  """Returns a slice of `x` along an axis, from a place that is in range."""
  starts = [jnp.int32(0)] * x.ndim
  starts[axis] = start
  sizes = [*x.shape[:axis], size, *x.shape[axis + 1 :]]
  return lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)


def _hidden_zero(x: Array) -> Array:
  """Returns an int32 zero that is computed from the first element of `x`."""
  word = core.to_bits(x.reshape(-1)[0]).astype(jnp.uint32)
  # This is zero for any word, because half of an unsigned number is not
  # negative as a signed one. The compiler cannot tell.
  zero = jnp.minimum((word >> 1).astype(jnp.int32), 0)
  return core.assert_replicated(
    zero, tuple(sorted(core.varying_axes(zero), key=str))
  )


def pad_apart(x: Array, count: int, fill: Array) -> Array:
  """Appends `count` rows of `fill` to an array, on CPU written to memory.

  >>> pad_apart(jnp.ones(2), 1, jnp.float32(0)).tolist()
  [1.0, 1.0, 0.0]
  """
  # XLA:CPU would ask in every loop that reads an element whether it is padding.
  # Alone, a concatenation is two copies.
  # x: vector, or array whose rows are along its first axis. fill: scalar of the
  # dtype of `x`.
  return write_apart(
    lambda x, fill: jnp.concatenate(
      [x, jnp.broadcast_to(fill, (count, *x.shape[1:]))]
    ),
    x,
    fill,
  )


def update_in_place(
  fn: Callable[[PyTree, PyTree], PyTree],
  target: PyTree,
  spent: PyTree,
  count: Array,
) -> PyTree:
  """Returns `fn(target, spent)`, on CPU written to the memory of `target`."""
  # XLA:CPU fuses a cheap expression into each of its readers, however many
  # there are, and optimization barriers are removed before. Each reader then
  # needs `target`, so the result cannot overwrite it: a copy, and fresh pages,
  # in every step.
  # A loop is a computation of its own and updates its carry in place, so on CPU
  # this is a loop of one iteration. On other backends it is a plain call.
  # fn: elementwise in `target` and cheap; it may close over other arrays.
  # spent: small arrays that are not needed afterwards.
  # count: int32[], at least 0, not known when the program is compiled.

  def in_place(target: PyTree, spent: PyTree, count: Array) -> PyTree:
    """Runs `fn` as the body of a loop, whose carry is updated in place."""
    # The loop has one iteration for any count, but the compiler cannot tell.
    iterations = jnp.minimum(count, 0) + 1
    # The loop overwrites `spent` with zeros. Otherwise XLA would compute
    # expressions of `spent` alone before the loop, and pass them through
    # memory.
    erased = jax.tree.map(jnp.zeros_like, spent)

    def run_once(carry: tuple[Array, PyTree, PyTree]) -> tuple[Any, ...]:
      left, value, spent = carry
      return left - 1, fn(value, spent), erased

    carry = (iterations, target, spent)
    return lax.while_loop(lambda c: c[0] > 0, run_once, carry)[1]

  call_directly = lambda target, spent, count: fn(target, spent)
  args = target, spent, count
  return choose_by_platform(*args, cpu=in_place, default=call_directly)


def schedule_after(x: Array, token: Array) -> Array:
  """Returns `x`; on CPU, its readers wait until `token` is computed."""
  # XLA:CPU combines all independent sums into one, which then starts when the
  # last operand is computed. It removes optimization barriers before it does
  # so, so they do not prevent that. The order is therefore made a data
  # dependency. On other backends `x` is returned as it is: they have schedulers
  # of their own.
  # x, token: of any integer or floating dtype.
  if not x.size or not token.size:
    # Without an element there is nothing to wait with, or for.
    return x

  def add_dependency(x: Array, token: Array) -> Array:
    """Adds a zero that is computed from the token to the first element."""
    zero = _hidden_zero(token)
    corner = (0,) * x.ndim
    # The zero is added to the bits: a sum of floats would lose the sign of -0.
    bits = core.to_bits(lax.slice(x, corner, (1,) * x.ndim))
    value = core.from_bits(bits + zero.astype(bits.dtype), x.dtype)
    return lax.dynamic_update_slice(x, value, corner)

  return choose_by_platform(
    x, token, cpu=add_dependency, default=lambda x, token: x
  )
