"""An optimiser whose state is encoded between its updates."""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from jaxmotion.codecs import Codec, nonnegative, uniform
from jaxmotion.core import (
  Array,
  Key,
  PyTree,
  check_choice,
  check_int,
  leaf_path,
  make_key,
)
from jaxmotion.memory._memory_kind import (
  MEMORY_KINDS,
  resolve_memory_kind,
  to_host,
)
from jaxmotion.memory.state._encoded_leaf import (
  EncodedLeaf,
  flatten,
  is_packed,
  pack,
)
from jaxmotion.memory.state._moments import Moments
from jaxmotion.memory.state._stream import stream

_FIRST = uniform(bits=8, block=256, rounding="stochastic")
_SECOND = nonnegative(rounding="stochastic")


class CompressedState(NamedTuple):
  """State of `compress_state`.

  Attributes:
    steps: int32[], updates so far.
    inner: the wrapped transformation's state, some of its leaves `EncodedLeaf`.
  """

  steps: Array
  inner: PyTree


def compress_state(
  tx: optax.GradientTransformation,
  *,
  first: Codec | None = _FIRST,
  second: Codec | None = _SECOND,
  rules: Sequence[tuple[str, Codec | None]] = (),
  min_leaf_size: int = 4096,
  memory_kind: str | None = None,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  r"""Keeps an optimiser's state encoded between its updates.

  .. math::
    u, s' = tx.update(g, decode(p)), \quad p \leftarrow encode(s')

  with s the moments among the leaves of the state: `mu`, `trace` and `ema` are
  first moments, `nu` second ones, by the names of optax's fields. All else is
  kept as it is: other fields, integers, keys, leaves of few values.

  Rounding is stochastic by default: an average that moves by less than half a
  level in a step would otherwise not move at all. Second moments are in a
  format where nothing above zero becomes zero: updates divide by their roots.

  An update decodes, computes and encodes parameter by parameter, each when the
  state of the last but one is encoded again, so that no more than a few are
  decoded at a time. An update that needs all state at once (a norm over it, a
  condition around all of it) decodes it at once.

  With `memory_kind="pinned_host"` the encoded leaves stay in the host's memory and
  come and go in that order. Where the device has no such memory, `init` warns
  and they stay on the device.

  Args:
    tx: any optax transformation.
    first: codec of first moments, or None.
    second: codec of second moments, or None.
    rules: pairs of a regular expression, searched for in the path of a
      floating-point leaf of the state ("0/mu/dense/kernel"), and a codec, or
      None to keep it as it is. The first that matches wins over the names.
    min_leaf_size: leaves of fewer values are kept as they are, whatever the rules.
    memory_kind: None or "pinned_host".
    seed: of stochastic rounding; with the number of updates and the leaf's
      path it determines every random bit.

  Returns:
    A transformation whose state is a `CompressedState`.

  Raises:
    TypeError: `tx` is no transformation, a codec is not one of arrays, or a
      rule no pair of a pattern and a codec.
    ValueError: a codec has state, or a pattern is no regular expression; in
      `init`, a rule matches no leaf, or no leaf is known by name or rule.

  Example:
    >>> import jax
    >>> def nbytes(tree):
    ...   return sum(a.nbytes for a in jax.tree.leaves(tree))
    >>> params = {"w": jnp.ones((256, 256)), "b": jnp.ones(256)}
    >>> plain, tx = optax.adam(1e-3), compress_state(optax.adam(1e-3))
    >>> state = tx.init(params)
    >>> updates, state = tx.update(params, state, params)
    >>> nbytes(plain.init(params)), nbytes(state)
    (526340, 134408)

  References:
    Dettmers et al., *8-bit Optimizers via Block-wise Quantization*, 2022; Li,
    Chen and Zhu, *Memory Efficient Optimizers with 4-bit States*, 2023 (a
    second moment must not become zero).
  """
  if not isinstance(tx, optax.GradientTransformation):
    raise TypeError(
      f"`tx` must be an optax.GradientTransformation, got {tx!r}."
    )
  moments = Moments(first, second, tuple(rules), min_leaf_size)
  check_choice("memory_kind", memory_kind, MEMORY_KINDS)
  check_int("seed", seed, 0, 2**32 - 1)
  inner_update = optax.with_extra_args_support(tx).update

  def init_fn(params: PyTree) -> CompressedState:
    entries, treedef = flatten(tx.init(params))
    codecs = moments.codecs(entries)
    steps = jnp.zeros((), jnp.int32)
    keys = _keys(seed, steps, entries)
    leaves = [
      x if codec is None else pack(x, codec, key)
      for (_, x), codec, key in zip(entries, codecs, keys, strict=True)
    ]
    if resolve_memory_kind(memory_kind):
      leaves = [to_host(x) if is_packed(x) else x for x in leaves]
    return CompressedState(steps, treedef.unflatten(leaves))

  def update_fn(
    updates: PyTree,
    state: CompressedState,
    params: PyTree | None = None,
    **extra_args: Any,
  ) -> tuple[PyTree, CompressedState]:
    steps = optax.safe_increment(state.steps)
    entries, treedef = flatten(state.inner)
    leaves = [x for _, x in entries]
    keys = _keys(seed, steps, entries)

    def inner(leaves: list[Any]) -> tuple[PyTree, list[Any]]:
      old = treedef.unflatten(leaves)
      u, new = inner_update(updates, old, params, **extra_args)
      return u, treedef.flatten_up_to(new)

    def encode(i: int, x: Array) -> EncodedLeaf:
      return pack(x, leaves[i].codec, keys[i])

    on_host = resolve_memory_kind(memory_kind, warn=False) is not None
    u, new = stream(inner, leaves, encode, on_host)
    return u, CompressedState(steps, treedef.unflatten(new))

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _keys(
  seed: int, steps: Array, entries: Sequence[tuple[Any, Any]]
) -> list[Key]:
  """Returns each leaf's own key.

  All are made at once: on a GPU each by itself would be kernels of its own.
  """
  paths = [zlib.crc32(leaf_path(path).encode()) for path, _ in entries]
  keys = make_key(seed).fold(steps).fold(jnp.array(np.array(paths, np.uint32)))
  return [Key(keys.shared[i], keys.worker[i]) for i in range(len(paths))]
