"""Optimizers whose state is encoded between updates."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmotion import core
from jaxmotion.codecs import Codec, extend, nonnegative, uniform
from jaxmotion.core import Array, PyTree
from jaxmotion.memory import _check_separate, _encoded_leaf, _memory_kind

_FIRST_MOMENT = uniform(bits=8, block=256, rounding="stochastic")
_SECOND_MOMENT = nonnegative(rounding="stochastic")
_SUM_OF_SQUARES = nonnegative(bits=16, rounding="stochastic")
# Fields in which optax keeps averages of gradients, averages of their squares,
# and sums of their squares, by the argument that has their codec.
_FIELDS = {
  "first": ("mu", "trace", "ema"),
  "second": ("nu", "v_row", "v_col"),
  "sums": ("sum_of_squares",),
}
_KIND_OF = {name: kind for kind, names in _FIELDS.items() for name in names}


class CompressedState(NamedTuple):
  """State of an optimizer that `compress_state` wraps."""

  steps: Array
  inner: PyTree


_own_codec = core.optional(
  functools.partial(extend.check_codec, stateless=True)
)


@core.declare(
  tx=_check_separate.transformation,
  first=_own_codec,
  second=_own_codec,
  sums=_own_codec,
  rules=core.sequence("pairs of a pattern and a codec"),
  min_leaf_size=core.integer(0),
  memory_kind=core.choice(_memory_kind.MEMORY_KINDS),
  seed=core.seed,
)
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
    A transformation. Its state has `steps`, the number of updates so far,
    int32[], and `inner`, the state of `tx` with some leaves as `EncodedLeaf`.

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
  path_rules = core.PathRules(rules, value="codec")
  for _, codec in path_rules:
    _own_codec("rules", codec)
  kinds = {"first": first, "second": second, "sums": sums}
  inner_update = optax.with_extra_args_support(tx).update

  @core.declare(params=core.arrays)
  def init_fn(params: PyTree) -> CompressedState:
    """Returns the encoded state before the first update."""
    entries, treedef = _encoded_leaf.flatten_encoded(tx.init(params))
    if any(_encoded_leaf.is_encoded(x) for _, x in entries):
      raise ValueError(
        "`tx` must have no encoded state, got one that `compress_state` or "
        "`adamw_8bit` made: wrap it once."
      )
    own_codecs = _choose_codecs(entries, kinds, path_rules, min_leaf_size)
    steps = jnp.zeros((), jnp.int32)
    keys = _leaf_keys(seed, steps, entries)
    # XLA computes what depends on constants alone while it compiles: a million
    # zeros took 7 seconds to encode. It may not assume that this is true.
    hidden_true = lax.optimization_barrier(jnp.bool_(True))
    hide = lambda x: jnp.where(hidden_true, x, jnp.ones_like(x))
    leaves = [
      x if codec is None else _encoded_leaf.encode_leaf(hide(x), codec, key)
      for (_, x), codec, key in zip(entries, own_codecs, keys, strict=True)
    ]
    inner = treedef.unflatten(leaves)
    if _memory_kind.can_move(memory_kind):
      inner = _encoded_leaf.map_encoded(_memory_kind.to_host, inner)
    return CompressedState(steps, inner)

  @core.declare(
    updates=core.arrays,
    state=core.instance(CompressedState, "a CompressedState"),
    params=core.arrays,
  )
  def update_fn(
    updates: PyTree,
    state: CompressedState,
    params: PyTree | None = None,
    **extra_args: Any,
  ) -> tuple[PyTree, CompressedState]:
    """Returns the updates of `tx`, and its state encoded again."""
    _check_update(tx, updates, state, params)
    steps = optax.safe_increment(state.steps)
    entries, treedef = _encoded_leaf.flatten_encoded(state.inner)
    keys = _leaf_keys(seed, steps, entries)

    def update_leaves(arrays: list[Any]) -> tuple[PyTree, list[Any]]:
      """Calls `tx` on the decoded leaves of its state; returns them changed."""
      old = treedef.unflatten(arrays)
      new_updates, new = inner_update(updates, old, params, **extra_args)
      return new_updates, treedef.flatten_up_to(new)

    on_host = _memory_kind.can_move(memory_kind, warn=False)
    leaves = [x for _, x in entries]
    new_updates, new = _encoded_leaf.stream_update(
      update_leaves, leaves, keys, on_host
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
  _encoded_leaf.check_payloads("state", state)
  if params is not None:
    core.check_like("updates", updates, params, "`params`")
    like = jax.eval_shape(
      lambda params: CompressedState(jnp.int32(0), tx.init(params)), params
    )
    decoded = _encoded_leaf.map_encoded(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state
    )
    core.check_like("state", decoded, like, "`init`")


def _leaf_keys(
  seed: int, steps: Array, entries: Sequence[tuple[Any, Any]]
) -> list[core.Key]:
  """Returns a key for each leaf."""
  paths = [core.leaf_path(path) for path, _ in entries]
  return extend.fold_paths(core.make_key(seed).fold(steps), paths)


def _choose_codecs(
  entries: Sequence[tuple[Any, Any]],
  codec_of_kind: Mapping[str, Codec | None],
  rules: core.PathRules[Codec | None],
  min_leaf_size: int,
) -> list[Codec | None]:
  """Returns the codec of every leaf, None for leaves that stay as they are."""
  paths = [
    path
    for path, x in entries
    if jnp.issubdtype(x.dtype, jnp.floating) and x.ndim > 0
  ]
  names = [core.leaf_path(path) for path in paths]
  rules.require_use(names, "floating-point leaf of the state")
  # States of Adafactor have the field `v_row`.
  factored = {
    path[:i]
    for path in paths
    for i, key in enumerate(path)
    if _field_name(key) == "v_row"
  }
  chosen: dict[Any, Codec | None] = {}
  for path, name in zip(paths, names, strict=True):
    kind = _moment_kind(path, factored)
    if (match := rules.first_match(name)) is not None:
      chosen[path] = match.value
    elif kind:
      chosen[path] = codec_of_kind[kind]
  if names and not chosen:
    raise ValueError(
      f"`tx` must keep state in a field named {', '.join(_KIND_OF)}, "
      f"or `rules` must match some, got {names}."
    )
  return [
    chosen.get(path) if x.size >= max(min_leaf_size, 1) else None
    for path, x in entries
  ]


def _moment_kind(path: Any, factored: set[Any]) -> str:
  """Returns the kind of the outermost moment field of a path, or ""."""
  # The outermost, because a parameter may be an attribute of such a name as
  # well. `v` is a second moment in a state of Adafactor. Other optimizers keep
  # averages with signs in fields of that name.
  for i, key in enumerate(path):
    name = _field_name(key)
    if name in _KIND_OF:
      return _KIND_OF[name]
    if name == "v" and path[:i] in factored:
      return "second"
  return ""


def _field_name(key: Any) -> str:
  """Returns the name of a field; "" for a key or a position."""
  return key.name if isinstance(key, jax.tree_util.GetAttrKey) else ""


@core.declare(
  b1=core.number(0, 1, open_high=True),
  b2=core.number(0, 1, open_high=True),
  eps=core.number(0),
  weight_decay=core.number(0),
)
def adamw_8bit(
  learning_rate: optax.ScalarOrSchedule = 1e-3,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: float = 1e-2,
  *,
  mask: PyTree | Callable[[optax.Params], Any] | None = None,
  min_leaf_size: int = 4096,
  block: int = 256,
  rules: Sequence[tuple[str, Codec | None]] = (),
  memory_kind: str | None = None,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Makes AdamW whose moments take 8 bits between updates.

  It is `compress_state(optax.adamw(...))` with the arguments and defaults of
  `AdamW8bit` of bitsandbytes: blocks of 256 elements, leaves of fewer than 4096
  in float32. Ours differs thus. First moments are on evenly spaced levels and
  second moments are floats of three bits of mantissa, both rounded
  stochastically. Theirs are on the levels of a dynamic tree, rounded to
  nearest. Embeddings are encoded unless a rule leaves them as they are. There
  is no clipping by percentiles and no `amsgrad`.

  Args:
    learning_rate: a number, or a schedule.
    b1: decay of first moments, in [0, 1).
    b2: decay of second moments, in [0, 1).
    eps: number that is added to the root of second moments.
    weight_decay: share of each parameter that an update subtracts, times the
      learning rate.
    mask: tree of bools, or function of parameters that returns one: which
      parameters decay.
    min_leaf_size: number of elements. Leaves of fewer stay as they are
      (`min_8bit_size` there).
    block: number of elements under one scale.
    rules: as of `compress_state`.
    memory_kind: None or "pinned_host", as of `compress_state`; the latter
      stands for a paged optimizer.
    seed: seed of stochastic rounding, in [0, 2**32).

  Returns:
    A transformation with the state of `compress_state`.

  Raises:
    TypeError, ValueError: as `compress_state`; a number is out of its range.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> tx = adamw_8bit(1e-3, rules=[("embedding", None)])
    >>> params = {"embedding": jnp.ones((64, 64)), "w": jnp.ones((64, 64))}
    >>> state = jax.eval_shape(tx.init, params)
    >>> type(state.inner[0].mu["w"]).__name__
    'EncodedLeaf'
    >>> state.inner[0].mu["embedding"].dtype
    dtype('float32')

  References:
    Dettmers et al., *8-bit Optimizers via Block-wise Quantization*, 2022. Code:
    bitsandbytes 0.45, optim/adamw.py.
  """
  if mask is not None and not callable(mask):
    for leaf in jax.tree.leaves(mask):
      core.boolean("mask", leaf)
  if not callable(learning_rate):
    core.number(0)("learning_rate", learning_rate)
  return compress_state(
    optax.adamw(
      learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=mask
    ),
    first=uniform(bits=8, block=block, rounding="stochastic"),
    second=nonnegative(block=block, rounding="stochastic"),
    rules=rules,
    min_leaf_size=min_leaf_size,
    memory_kind=memory_kind,
    seed=seed,
  )
