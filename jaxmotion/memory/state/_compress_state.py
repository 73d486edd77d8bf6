"""`compress_state`: optimizer state that is encoded between updates."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmotion import core
from jaxmotion.codecs import Codec, nonnegative, uniform
from jaxmotion.codecs.extend import fold_paths
from jaxmotion.core import Array, PyTree
from jaxmotion.memory import _memory_kind
from jaxmotion.memory.state import _encoded_leaf, _moments, _stream

_FIRST_MOMENT = uniform(bits=8, block=256, rounding="stochastic")
_SECOND_MOMENT = nonnegative(rounding="stochastic")
_SUM_OF_SQUARES = nonnegative(bits=16, rounding="stochastic")


class CompressedState(NamedTuple):
  """State of an optimizer that `compress_state` wraps.

  Attributes:
    steps: int32[], number of updates so far.
    inner: state of the wrapped transformation, some of its leaves
      `EncodedLeaf`.

  Example:
    >>> import optax
    >>> from jaxmotion import memory
    >>> tx = memory.compress_state(optax.adam(1e-3), min_leaf_size=0)
    >>> state = tx.init(jnp.zeros((64, 64)))
    >>> int(state.steps), type(state.inner[0].mu).__name__
    (0, 'EncodedLeaf')
  """

  steps: Array
  inner: PyTree


def compress_state(
  tx: optax.GradientTransformation,
  *,
  first: Codec | None = _FIRST_MOMENT,
  second: Codec | None = _SECOND_MOMENT,
  sums: Codec | None = _SUM_OF_SQUARES,
  rules: Sequence[tuple[str, Codec | None]] = (),
  min_leaf_size: int = 4096,
  memory_kind: str | None = None,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  r"""Wraps an optimizer so that its state is encoded between updates.

  .. math::
    u, s' = tx.update(g, decode(p)), \quad p \leftarrow encode(s')

  with s the moments in the optimizer's state. Optax's field names identify
  them: `mu`, `trace` and `ema` are first moments; `nu`, and `v_row`, `v_col`
  and `v` of Adafactor, are second moments; `sum_of_squares` of Adagrad is a
  sum. Other fields, integers, keys and small leaves stay as they are.

  Rounding is stochastic by default. Rounding to nearest would never change an
  average that moves by less than half a level per step. The default formats of
  second moments and sums round no positive element to zero, because updates
  divide by their square root. A sum never forgets a rounding: it takes 16 bits.

  An update decodes, computes and encodes one parameter after another. Each
  parameter waits until the state of the last but one is encoded again, so that
  only a few are decoded at a time. An update that needs all state at once (a
  norm over it, a condition around all of it) decodes it at once.

  With `memory_kind="pinned_host"` the encoded leaves stay in host memory and
  are transferred in that order. If the device has no such memory, `init` warns
  and they stay on the device.

  Args:
    tx: any optax transformation.
    first: codec of first moments, a codec of arrays without state; None leaves
      them as they are.
    second: codec of second moments, likewise.
    sums: codec of sums of squares, likewise.
    rules: pairs of a regular expression and a codec, or None to leave a leaf as
      it is. The expression is searched for in the path of each floating-point
      leaf of the state ("0/mu/dense/kernel"). The first rule that matches a
      path wins, also over the arguments above.
    min_leaf_size: number of elements. Leaves of fewer stay as they are,
      whatever the rules.
    memory_kind: None or "pinned_host".
    seed: seed of stochastic rounding, in [0, 2**32). With the number of updates
      and the leaf's path it determines every random bit.

  Returns:
    A transformation whose state is a `CompressedState`.

  Raises:
    TypeError: `tx` is not a transformation, a codec is not one of arrays, or a
      rule is not a pair of a pattern and a codec.
    ValueError: a codec has state, or a pattern is not a regular expression. In
      `init`, a rule matches no leaf, neither field names nor rules select a
      leaf, or `tx` encodes its state itself.

  Example:
    >>> import jax
    >>> def nbytes(tree):
    ...   return sum(a.nbytes for a in jax.tree.leaves(tree))
    >>> params = {"w": jnp.ones((256, 256)), "b": jnp.ones(256)}
    >>> plain, tx = optax.adam(1e-3), compress_state(optax.adam(1e-3))
    >>> state = jax.jit(tx.init)(params)
    >>> updates, state = jax.jit(tx.update)(params, state, params)
    >>> nbytes(plain.init(params)), nbytes(state)
    (526340, 134408)

  References:
    Dettmers et al., *8-bit Optimizers via Block-wise Quantization*, 2022. Li,
    Chen and Zhu, *Memory Efficient Optimizers with 4-bit States*, 2023 (a
    second moment must not become zero).
  """
  if not isinstance(tx, optax.GradientTransformation):
    raise TypeError(
      f"`tx` must be an optax.GradientTransformation, got {tx!r}."
    )
  kinds = {"first": first, "second": second, "sums": sums}
  moments = _moments.MomentCodecs(kinds, rules, min_leaf_size)
  core.check_choice("memory_kind", memory_kind, _memory_kind.MEMORY_KINDS)
  core.check_int("seed", seed, 0, 2**32 - 1)
  inner_update = optax.with_extra_args_support(tx).update

  def init_fn(params: PyTree) -> CompressedState:
    core.check_arrays("params", params)
    entries, treedef = _encoded_leaf.flatten_encoded(tx.init(params))
    if any(_encoded_leaf.is_encoded(x) for _, x in entries):
      raise ValueError(
        "`tx` must have no encoded state, got one that `compress_state` or "
        "`adamw_8bit` made: wrap it once."
      )
    codecs = moments.choose_codecs(entries)
    steps = jnp.zeros((), jnp.int32)
    keys = _leaf_keys(seed, steps, entries)
    leaves = [
      x if codec is None else _encoded_leaf.encode_leaf(x, codec, key)
      for (_, x), codec, key in zip(entries, codecs, keys, strict=True)
    ]
    if _memory_kind.resolve_memory_kind(memory_kind):
      leaves = [
        _memory_kind.to_host(x) if _encoded_leaf.is_encoded(x) else x
        for x in leaves
      ]
    return CompressedState(steps, treedef.unflatten(leaves))

  def update_fn(
    updates: PyTree,
    state: CompressedState,
    params: PyTree | None = None,
    **extra_args: Any,
  ) -> tuple[PyTree, CompressedState]:
    _check_update(tx, updates, state, params)
    steps = optax.safe_increment(state.steps)
    entries, treedef = _encoded_leaf.flatten_encoded(state.inner)
    leaves = [x for _, x in entries]
    keys = _leaf_keys(seed, steps, entries)

    def update_leaves(arrays: list[Any]) -> tuple[PyTree, list[Any]]:
      old = treedef.unflatten(arrays)
      new_updates, new = inner_update(updates, old, params, **extra_args)
      return new_updates, treedef.flatten_up_to(new)

    def encode_again(i: int, x: Array) -> _encoded_leaf.EncodedLeaf:
      return _encoded_leaf.encode_leaf(x, leaves[i].codec, keys[i])

    on_host = (
      _memory_kind.resolve_memory_kind(memory_kind, warn=False) is not None
    )
    new_updates, new = _stream.stream_update(
      update_leaves, leaves, encode_again, on_host
    )
    return new_updates, CompressedState(steps, treedef.unflatten(new))

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_update(
  tx: optax.GradientTransformation,
  updates: PyTree,
  state: CompressedState,
  params: PyTree | None,
) -> None:
  """Raises unless the arguments of an update belong together."""
  core.check_arrays("updates", updates)
  core.check_arrays("params", params)
  core.check_instance("state", state, CompressedState, "a CompressedState")
  _encoded_leaf.check_payloads("state", state)
  if params is not None:
    core.check_like("updates", updates, params, "`params`")
    like = jax.eval_shape(
      lambda params: CompressedState(jnp.int32(0), tx.init(params)), params
    )
    core.check_like("state", _encoded_leaf.decoded_likes(state), like, "`init`")


def _leaf_keys(
  seed: int, steps: Array, entries: Sequence[tuple[Any, Any]]
) -> list[core.Key]:
  """Returns a key for each leaf."""
  paths = [core.leaf_path(path) for path, _ in entries]
  return fold_paths(core.make_key(seed).fold(steps), paths)
