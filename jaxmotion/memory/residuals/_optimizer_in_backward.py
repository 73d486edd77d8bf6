"""`OptimizerInBackward`: parameters are updated within the backward pass."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmotion import core, hosts
from jaxmotion.core import Array, PyTree
from jaxmotion.memory import _check_separate, _memory_kind
from jaxmotion.memory.residuals import _traced, choose, run

Block = Callable[[PyTree, PyTree], PyTree]


def _block(name: str, value: Any) -> Any:
  """Returns a pair of a function and its repeats, or raises."""
  if not isinstance(value, list | tuple) or len(value) != 2:
    raise TypeError(
      f"`{name}` must be a pair of a function and its repeats, got {value!r}."
    )
  core.function(f"{name}[0]", value[0])
  core.integer(1)(f"{name}[1]", value[1])
  return value


@dataclasses.dataclass(frozen=True)
@core.declare(
  blocks=core.sequence("pairs of a function and its repeats", _block),
  loss=core.function,
  tx=_check_separate.transformation,
  segment=core.optional(core.integer(1)),
)
class OptimizerInBackward:
  """Trains a chain of blocks without holding the gradients of all of them.

  The gradients of a block exist only during the block's own update, which
  overwrites its parameters. Besides parameters and optimizer state, a step
  needs the residuals of the backward pass and the gradients of one block (of
  one segment).

  Without `segment`, the residuals are those that `compress_residuals` saves for
  each block. With it, only the input of each segment is saved, and the backward
  pass recomputes the rest from there.

  Args:
    blocks: pairs of a function (params, x) -> x and its number of repeats.
      Repeated blocks have parameters stacked along a leading axis and outputs
      of the shapes of their inputs, and run in one loop.
    loss: function (x, *batch) -> scalar of the last block's output.
    tx: optax transformation. It is called for each block by itself, with states
      of its own for repeats. It must update each array from the array's own
      gradient: a norm over all gradients is refused.
    codec: codec, rules or choice as for `compress_residuals`. Offloaded
      residuals are transferred while the neighboring iteration computes.
    segment: number of repeats that are recomputed together in the backward
      pass; None recomputes nothing but cheap operations.

  Raises:
    TypeError: `tx` is not a transformation, `loss` or a block is not a
      function, or `codec` is none that `compress_residuals` takes.
    ValueError: there are no blocks, or a number is less than 1.

  Example:
    >>> import optax
    >>> def layer(w, x):
    ...   return jnp.tanh(x @ w)
    >>> def loss(x, y):
    ...   return jnp.mean((x - y) ** 2)
    >>> model = OptimizerInBackward([(layer, 3)], loss, optax.sgd(0.1))
    >>> params = [jnp.stack([jnp.eye(2)] * 3)]
    >>> state = model.init(params)
    >>> step = jax.jit(model.step, donate_argnums=(0, 1))
    >>> x, y = jnp.eye(2), jnp.zeros((2, 2))
    >>> params, state, value = step(params, state, x, y)
    >>> params[0].shape, bool(value > 0)
    ((3, 2, 2), True)

  References:
    Lv et al., *Full Parameter Fine-tuning for Large Language Models with
    Limited Resources*, 2023 (LOMO). Jin et al., *Layrub: layer-centric GPU
    memory reuse and data migration in extreme-scale deep learning systems*,
    2018.
  """

  blocks: Sequence[tuple[Block, int]]
  loss: Callable[..., Array]
  tx: optax.GradientTransformation
  _: dataclasses.KW_ONLY
  codec: choose.Action | choose.ResidualRules | choose.ResidualChoice = None
  segment: int | None = None

  def __post_init__(self) -> None:
    if not self.blocks:
      raise ValueError("`blocks` must hold at least one block, got none.")
    choose.make_choice(self.codec)  # Raises for what is none.

  def init(self, params: Sequence[PyTree]) -> list[PyTree]:
    """Returns the optimizer state of each block, stacked like its parameters.

    Args:
      params: parameters of each block.

    Raises:
      TypeError: a parameter is not a floating-point array.
      ValueError: there is not one tree for each block, or the parameters of a
        block are not stacked as often as it is repeated. `tx` updates an array
        from the gradient of another.
    """
    self._check_params(params)
    for own, (_, repeats) in zip(params, self.blocks, strict=True):
      row = own if repeats == 1 else jax.tree.map(lambda a: a[0], own)
      _check_separate.check_separate(self.tx, row, "block")
    return [
      self.tx.init(own) if repeats == 1 else jax.vmap(self.tx.init)(own)
      for own, (_, repeats) in zip(params, self.blocks, strict=True)
    ]

  @core.declare(x=core.arrays)
  def step(
    self,
    params: Sequence[PyTree],
    state: Sequence[PyTree],
    x: PyTree,
    *batch: Any,
  ) -> tuple[list[PyTree], list[PyTree], Array]:
    """Updates all parameters once. Jit it, and donate the first two arguments.

    Args:
      params: parameters of each block.
      state: state from `init` or the last step.
      x: input of the first block.
      *batch: further arguments of `loss`.

    Returns:
      New parameters, new state, and the loss before the update.

    Raises:
      TypeError: a parameter is not a floating-point array, or another argument
        is no tree of arrays.
      ValueError: there is not one tree of `params` for each block, or it is not
        stacked as often as the block is repeated. `state` is that of other
        parameters. A repeated block changes the shapes of its input. A rule of
        `codec` matches no residual. `loss` does not return a scalar.
    """
    self._check_params(params)
    state = list(state) if type(state) is tuple else state
    core.check_like("state", state, jax.eval_shape(self.init, params), "`init`")
    core.arrays("batch", batch)
    loops: list[tuple[int, _SingleBlock | _BlockLoop, PyTree]] = []
    names: list[str] = []
    for i in range(len(self.blocks)):
      for loop in self._block_loops(i, params[i], x):
        y, residuals = loop.forward(params[i], x)
        names += loop.passes.residual_names()
        loops.append((i, loop, residuals))
        x = y
    choose.check_rules(self.codec, lambda: names)
    value, pullback = jax.vjp(lambda x: self.loss(x, *batch), x)
    _check_loss(value)
    (ct,) = pullback(jnp.ones_like(value))
    params, state = list(params), list(state)
    for i, loop, residuals in reversed(loops):
      ct, params[i], state[i] = loop.backward(
        params[i], state[i], residuals, ct
      )
    return params, state, value

  def _check_params(self, params: Sequence[PyTree]) -> None:
    """Raises unless there are parameters for every repeat of every block."""
    wanted = f"{len(self.blocks)} trees, one for each block"
    if not isinstance(params, list | tuple):
      raise TypeError(f"`params` must be {wanted}, got {params!r:.200}.")
    if len(params) != len(self.blocks):
      raise ValueError(f"`params` must be {wanted}, got {len(params)}.")
    core.arrays("params", params)
    for i, (_, repeats) in enumerate(self.blocks):
      for path, x in core.named_leaves(params[i]):
        core.float_array("/".join(filter(None, (f"params[{i}]", path))), x)
        if repeats > 1 and jnp.shape(x)[:1] != (repeats,):
          raise ValueError(
            f"`params[{i}]` must be stacked {repeats} times along a leading "
            f"axis, got {core.shape_string(x)} at {path!r}."
          )

  def _block_loops(
    self, index: int, params: PyTree, x: PyTree
  ) -> "list[_SingleBlock | _BlockLoop]":
    """Returns the loops that together run all repeats of a block."""
    # A number of repeats that the segment does not divide leaves a shorter last
    # segment, which is a loop of its own.
    block, repeats = self.blocks[index]
    if repeats == 1:
      return [_SingleBlock(self._split_block(block, params, x), self.tx)]
    row = jax.tree.map(lambda a: core.abstract_like(a[0]), params)
    _check_repeated(f"blocks[{index}]", jax.eval_shape(block, row, x), x)
    size = min(self.segment or 1, repeats)
    whole, rest = divmod(repeats, size)
    loops: list[_SingleBlock | _BlockLoop] = []
    for start, length, count in ((0, size, whole), (whole * size, rest, 1)):
      if length:
        chain = _chain_repeats(block, length)
        own = _slice_segment(params, start, length)
        passes = self._split_block(chain, own, x, count)
        loops.append(_BlockLoop(passes, self.tx, start, length, count))
    return loops

  def _split_block(
    self, block: Block, params: PyTree, x: PyTree, repeats: int = 1
  ) -> _traced.Passes:
    """Traces a block, and chooses what its backward pass finds saved."""
    # In segments the fewest bytes are saved: their inputs.
    budget = None if self.segment is None else 0.0
    likes = jax.tree.map(core.abstract_like, (params, x))
    options = choose.make_options(self.codec, budget)
    return _traced.Passes(block, likes, options, repeats)


def _check_loss(value: Any) -> None:
  """Raises unless the loss is one floating-point number."""
  is_scalar = isinstance(value, jax.Array) and value.shape == ()
  if not is_scalar or not jnp.issubdtype(value.dtype, jnp.floating):
    shapes = jax.tree.map(core.shape_string, value)
    raise ValueError(
      f"`loss` must return a floating-point scalar, got {shapes}."
    )


def _check_repeated(name: str, y: PyTree, x: PyTree) -> None:
  """Raises unless a block's output has the types of its input."""
  types = [
    jax.tree.map(lambda a: core.shape_string(core.abstract_like(a)), tree)
    for tree in (y, x)
  ]
  if types[0] != types[1]:
    raise ValueError(
      f"`{name}` must keep the shapes of its input, because it is repeated, "
      f"got {types[0]} from {types[1]}."
    )


class _SingleBlock(NamedTuple):
  """A block that is not repeated: its two passes and the update."""

  passes: _traced.Passes
  tx: optax.GradientTransformation

  def forward(self, params: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the output and the residuals."""
    return self.passes.forward(params, x)

  def backward(
    self, params: PyTree, state: PyTree, residuals: PyTree, ct: PyTree
  ) -> tuple[PyTree, PyTree, PyTree]:
    """Returns the input's cotangent, new parameters and new state."""
    grads, ct = self.passes.backward(params, residuals, ct)
    updates, state = self.tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    # Without the barrier XLA may postpone the updates, and would hold the
    # gradients until all blocks have theirs.
    return lax.optimization_barrier((ct, params, state))


class _BlockLoop(NamedTuple):
  """Loops over segments of a repeated block, forward and backward.

  Both loops are `lax.scan`s with a software pipeline of depth one for residuals
  on the host. An iteration carries its host buffers to the next, which sends
  them (forward) or has fetched them (backward) while it computes. The buffers
  of the last forward iteration are the first that the backward loop reads: they
  stay on the device.

  The backward loop carries parameters and state, and writes each segment's
  slice in place. XLA would copy the whole stack in two cases. One is that
  anything may read the old slice after the write (`schedule_after` prevents
  it). The other is that a convolution wants another layout
  (`_materialize_kernels` prevents it).
  """

  passes: _traced.Passes
  tx: optax.GradientTransformation
  start: int  # First repeat.
  length: int  # Repeats in a segment, one iteration of the loop.
  segments: int  # Iterations.

  def forward(self, params: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the output and the residuals."""
    # The residuals are the last iteration's host buffers on the device. Stacked
    # over iterations, they are also the device's residuals and the host buffers
    # of the iteration before.
    buffers, beside = self._host_buffers(), (params, x)

    def body(carry: Any, start: Array) -> tuple[Any, Any]:
      x, previous = carry
      own_params = _slice_segment(params, start, self.length)
      x, residuals = self.passes.forward(own_params, x, transfer=False)
      on_device, for_host = buffers.pack(residuals, beside)
      return (x, for_host), (on_device, _memory_kind.to_host(previous))

    first = (x, buffers.zeros(beside))
    (x, last), stacked = lax.scan(body, first, self._segment_starts())
    return x, (last, *stacked)

  def backward(
    self, params: PyTree, state: PyTree, residuals: PyTree, ct: PyTree
  ) -> tuple[PyTree, PyTree, PyTree]:
    """Returns the input's cotangent, new parameters and new state."""
    last, on_device, on_host = residuals
    buffers = self._host_buffers()

    def body(carry: Any, iteration: Any) -> tuple[Any, None]:
      """Runs a segment backward and updates its parameters in the stack."""
      ct, params, state, fetched = carry
      start, own_on_device, previous = iteration
      # For the next iteration, the segment before this one.
      previous = _memory_kind.to_device(previous)
      own_params = _slice_segment(params, start, self.length)
      own_state = _slice_segment(state, start, self.length)
      own_residuals = buffers.merge(own_on_device, fetched)
      grads, ct = self.passes.backward(
        own_params, own_residuals, ct, transfer=False
      )
      grads = jax.tree.map(_materialize_kernels, grads)
      updates, own_state = jax.vmap(self.tx.update)(
        grads, own_state, own_params
      )
      own_params = optax.apply_updates(own_params, updates)
      # Write the parameters after everything has read the old ones (`ct` is
      # the last result that does), or XLA:CPU copies them.
      own_params = jax.tree.map(
        lambda a: hosts.schedule_after(a, jax.tree.leaves(ct)[0]), own_params
      )
      params = _write_segment(params, own_params, start)
      state = _write_segment(state, own_state, start)
      return (ct, params, state, buffers.unpack(previous)), None

    first = (ct, params, state, buffers.unpack(last))
    iterations = (self._segment_starts(), on_device, on_host)
    (ct, params, state, _), _ = lax.scan(body, first, iterations, reverse=True)
    return ct, params, state

  def _segment_starts(self) -> Array:
    """Returns the first repeat of each segment, int32[segments]."""
    return self.start + self.length * jnp.arange(self.segments)

  def _host_buffers(self) -> run.HostBuffers:
    """Returns the layout of what one iteration keeps."""
    return run.HostBuffers(self.passes.saved_residuals())


def _chain_repeats(block: Block, size: int) -> Block:
  """Returns a block that runs several repeats, their parameters stacked."""
  if size == 1:
    return lambda params, x: block(jax.tree.map(lambda a: a[0], params), x)

  def run_repeats(params: PyTree, x: PyTree) -> PyTree:
    return lax.scan(lambda x, own: (block(own, x), None), x, params)[0]

  return run_repeats


def _slice_segment(tree: PyTree, start: Any, length: int) -> PyTree:
  """Returns the rows of a segment from the stacks of a tree."""

  def slice_leaf(a: Array) -> Array:
    rows = lax.dynamic_slice_in_dim(_as_matrix(a), start, length)
    return _materialize_kernels(rows.reshape(length, *a.shape[1:]))

  return jax.tree.map(slice_leaf, tree)


def _write_segment(tree: PyTree, segment: PyTree, start: Array) -> PyTree:
  """Writes the rows of a segment into the stacks of a tree."""

  def write_leaf(a: Array, b: Array) -> Array:
    rows = lax.dynamic_update_slice_in_dim(
      _as_matrix(a), _as_matrix(b), start, 0
    )
    return rows.reshape(a.shape)

  return jax.tree.map(write_leaf, tree, segment)


def _as_matrix(a: Array) -> Array:
  """Returns a stack of convolution kernels as a matrix; other arrays as is."""
  return a.reshape(len(a), math.prod(a.shape[1:])) if a.ndim > 4 else a


def _materialize_kernels(a: Array) -> Array:
  """Writes a slice of a stack of convolution kernels to memory, as a matrix."""
  # Otherwise XLA gives the whole stack the layout that its convolution wants,
  # in a copy as large as all parameters. Other arrays stay as they are.
  if a.ndim <= 4:
    return a
  return lax.optimization_barrier(_as_matrix(a)).reshape(a.shape)
