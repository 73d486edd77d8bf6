"""A backward pass that updates each layer's parameters as it goes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmotion.core import (
  Array,
  PyTree,
  abstract_like,
  check_int,
  schedule_after,
)
from jaxmotion.memory._memory_kind import to_device, to_host
from jaxmotion.memory.residuals import (
  Action,
  HostBuffers,
  Passes,
  ResidualChoice,
  ResidualRules,
  split_passes,
)

Block = Callable[[PyTree, PyTree], PyTree]


@dataclasses.dataclass(frozen=True)
class OptimizerInBackward:
  """Trains a chain of blocks and never holds the gradients of all of them.

  The gradients of a block are there for as long as its own update takes, which
  overwrites its parameters: beside parameters and optimiser state, a step needs
  what is kept for the backward pass and the gradients of one block (of one
  segment).

  Where nothing is computed again, that is what `compress_residuals` keeps of
  each block; with `segment`, it is the input of so many blocks, from which the
  rest is computed again.

  Args:
    blocks: pairs of a function (params, x) -> x and how often it is repeated.
      Repeated blocks have parameters stacked along a leading axis, outputs of
      the shapes of their inputs, and run in one loop.
    loss: function (x, *batch) -> scalar of the last block's output.
    tx: optax transformation. It is called for each block by itself, with
      states of its own for repeats: nothing is computed over all gradients.
    codec: as for `compress_residuals`; what it offloads travels while the turn
      after it, or before it, computes.
    segment: repeats whose inside is computed again together; None computes
      nothing again but what is cheap.

  Raises:
    TypeError: `tx` or a block is none.
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
  codec: Action | ResidualRules | ResidualChoice = None
  segment: int | None = None

  def __post_init__(self) -> None:
    if not self.blocks:
      raise ValueError("`blocks` must hold at least one block, got none.")
    for i, (block, repeats) in enumerate(self.blocks):
      if not callable(block):
        raise TypeError(
          f"`blocks[{i}]` must start with a function, got {block!r}."
        )
      check_int(f"blocks[{i}][1]", repeats, 1)
    if self.segment is not None:
      check_int("segment", self.segment, 1)
    if not isinstance(self.tx, optax.GradientTransformation):
      raise TypeError(
        f"`tx` must be an optax.GradientTransformation, got {self.tx!r}."
      )

  def init(self, params: Sequence[PyTree]) -> list[PyTree]:
    """Returns the optimiser's state for each block, stacked like its params.

    Args:
      params: of each block.

    Raises:
      ValueError: not one for each block.
    """
    self._check(params)
    return [
      self.tx.init(own) if repeats == 1 else jax.vmap(self.tx.init)(own)
      for own, (_, repeats) in zip(params, self.blocks, strict=True)
    ]

  def step(
    self,
    params: Sequence[PyTree],
    state: Sequence[PyTree],
    x: PyTree,
    *batch: Any,
  ) -> tuple[list[PyTree], list[PyTree], Array]:
    """Updates all parameters once. Jit it, and donate the first two.

    Args:
      params: of each block.
      state: from `init` or the last step.
      x: input of the first block.
      *batch: what else `loss` takes.

    Returns:
      New parameters, new state, and the loss before the update.

    Raises:
      ValueError: not one of `params` or `state` for each block.
    """
    self._check(params)
    pieces: list[tuple[int, _Once | _Loop, PyTree]] = []
    for i, (block, repeats) in enumerate(self.blocks):
      for piece in self._pieces(block, repeats, params[i], x):
        x, words = piece.forward(params[i], x)
        pieces.append((i, piece, words))
    value, pull = jax.vjp(lambda x: self.loss(x, *batch), x)
    (ct,) = pull(jnp.ones_like(value))
    params, state = list(params), list(state)
    for i, piece, words in reversed(pieces):
      ct, params[i], state[i] = piece.backward(params[i], state[i], words, ct)
    return params, state, value

  def _check(self, params: Sequence[PyTree]) -> None:
    if len(params) != len(self.blocks):
      raise ValueError(
        f"`params` must be {len(self.blocks)} trees, one for each block, got "
        f"{len(params)}."
      )

  def _pieces(
    self, block: Block, repeats: int, params: PyTree, x: PyTree
  ) -> list[_Once | _Loop]:
    if repeats == 1:
      return [_Once(self._split(block, params, x), self.tx)]
    size = min(self.segment or 1, repeats)
    whole, rest = divmod(repeats, size)
    spans = [_Span(0, size, whole)]
    if rest:
      spans.append(_Span(whole * size, rest, 1))
    return [
      _Loop(
        self._split(_chain(block, s.size), s.rows(params, s.start), x),
        self.tx,
        s,
      )
      for s in spans
    ]

  def _split(self, block: Block, params: PyTree, x: PyTree) -> Passes:
    return split_passes(
      block,
      jax.tree.map(abstract_like, (params, x)),
      self.codec,
      recompute="cheap" if self.segment is None else "all",
    )


class _Span(NamedTuple):
  """Which repeats run in a loop, and how many at a time.

  Attributes:
    start: the first.
    size: repeats at a time.
    loops: how often.
  """

  start: int
  size: int
  loops: int

  def starts(self) -> Array:
    """The first repeat of each turn."""
    return self.start + self.size * jnp.arange(self.loops)

  def rows(self, tree: PyTree, start: Any) -> PyTree:
    """The parameters or the state of one turn."""

    def part(a: Array) -> Array:
      rows = lax.dynamic_slice_in_dim(_rows(a), start, self.size)
      return rows.reshape(self.size, *a.shape[1:])

    return jax.tree.map(lambda a: _apart(part(a)), tree)


class _Once(NamedTuple):
  """A block that is not repeated."""

  halves: Passes
  tx: optax.GradientTransformation

  def forward(self, params: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the output and what is kept."""
    return self.halves.forward(params, x)

  def backward(
    self, params: PyTree, state: PyTree, words: PyTree, ct: PyTree
  ) -> tuple[PyTree, PyTree, PyTree]:
    """Returns the input's cotangent, new parameters and new state."""
    grads, ct = self.halves.backward(params, words, ct)
    updates, state = self.tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    # Or gradients would be kept until all blocks have theirs.
    return lax.optimization_barrier((ct, params, state))


class _Loop(NamedTuple):
  """A loop over segments of a repeated block; see `_Once`.

  What goes to the host does so while the next turn computes, and comes back
  while the one before does: the words of a turn are carried to the next, and
  those of the last never leave the device.
  """

  halves: Passes
  tx: optax.GradientTransformation
  span: _Span

  def forward(self, params: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the output and what is kept."""
    words_of, beside = self._words_of(), (params, x)

    def body(carry: Any, start: Array) -> tuple[Any, Any]:
      x, before = carry
      own = self.span.rows(params, start)
      x, words = self.halves.forward(own, x, transfer=False)
      here, there = words_of.pack(words, beside)
      return (x, there), (here, to_host(before))

    start = (x, words_of.zeros(beside))
    (x, last), kept = lax.scan(body, start, self.span.starts())
    return x, (last, *kept)

  def backward(
    self, params: PyTree, state: PyTree, words: PyTree, ct: PyTree
  ) -> tuple[PyTree, PyTree, PyTree]:
    """Returns the input's cotangent, new parameters and new state."""
    last, here, there = words
    words_of = self._words_of()

    def body(carry: Any, kept: Any) -> tuple[Any, None]:
      ct, params, state, far = carry
      start, near, before = kept
      before = to_device(before)
      own, mine = (self.span.rows(t, start) for t in (params, state))
      words = words_of.merge(near, far)
      grads, ct = self.halves.backward(own, words, ct, transfer=False)
      grads = jax.tree.map(_apart, grads)
      updates, mine = jax.vmap(self.tx.update)(grads, mine, own)
      own = optax.apply_updates(own, updates)
      # Whoever reads the old parameters has done so, or XLA:CPU copies them.
      own = jax.tree.map(
        lambda a: schedule_after(a, jax.tree.leaves(ct)[0]), own
      )
      params, state = _put(params, own, start), _put(state, mine, start)
      return (ct, params, state, words_of.unpack(before)), None

    begin = (ct, params, state, words_of.unpack(last))
    turns = (self.span.starts(), here, there)
    (ct, params, state, _), _ = lax.scan(body, begin, turns, reverse=True)
    return ct, params, state

  def _words_of(self) -> HostBuffers:
    return HostBuffers(self.halves.saved_residuals())


def _chain(block: Block, size: int) -> Block:
  """Several repeats as one block."""
  if size == 1:
    return lambda params, x: block(jax.tree.map(lambda a: a[0], params), x)

  def run(params: PyTree, x: PyTree) -> PyTree:
    return lax.scan(lambda x, own: (block(own, x), None), x, params)[0]

  return run


def _put(tree: PyTree, part: PyTree, start: Array) -> PyTree:
  def whole(a: Array, b: Array) -> Array:
    rows = lax.dynamic_update_slice_in_dim(_rows(a), _rows(b), start, 0)
    return rows.reshape(a.shape)

  return jax.tree.map(whole, tree, part)


def _rows(a: Array) -> Array:
  """A stack of kernels of convolutions as a matrix."""
  return a.reshape(len(a), math.prod(a.shape[1:])) if a.ndim > 4 else a


def _apart(a: Array) -> Array:
  """Some kernels of a stack, as a matrix in memory first.

  XLA would give the whole stack the layout that its convolution wants, in a
  copy as large as all parameters.
  """
  if a.ndim <= 4:
    return a
  return lax.optimization_barrier(_rows(a)).reshape(a.shape)
