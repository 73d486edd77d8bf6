"""The outer step: from an anchor and accepted contributions to the next one.

Every function here is pure. Islands that call them with the same bits on the
same hardware get the same bits back.

A change is the anchor minus an island's parameters. It is encoded as
`exchange(..., method="gather")` encodes a gradient, and contributions are
decoded, added and averaged as there, in the order of a commit.
"""

import dataclasses
import functools
import math
import types
import zlib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmotion import codecs, core, kernels
from jaxmotion.codecs.extend import Partition, check_codec, partition
from jaxmotion.collectives import extend
from jaxmotion.core import Array, PyTree
from jaxmotion.islands import _message
from jaxmotion.islands._message import MessageError

# Compiled for each outer step, of which a process has one for each fragment.
_compile = functools.partial(jax.jit, static_argnums=0)


class OtherAnchorError(MessageError):
  """A contribution to an anchor with other bits."""


class Agreed(NamedTuple):
  """State that all islands have at the start of a round, with equal bits."""

  round: int
  anchor: PyTree
  outer_state: PyTree
  checksum: str  # Of both.
  # SHA-256 of the contribution of each island that was accepted last. An island
  # that slept while rounds were deleted learns from it what was counted.
  counted: Mapping[str, str] = types.MappingProxyType({})


class Contribution(NamedTuple):
  """Change of one island in a round."""

  island: str
  tokens: float  # Weight of the island in the mean.
  payloads: list[PyTree]  # One for each array.


@dataclasses.dataclass(frozen=True)
class OuterStep:
  """Encodes changes, checks contributions, and makes the next anchor.

  Attributes:
    codec: codec of the changes.
    outer: optimizer of the anchor.
    treedef: structure of the parameters.
    likes: shape and dtype of each leaf of the parameters.
    max_norm: largest L2 norm of a change that is accepted, or None.
    fragment: number of the fragment, as text, or None of whole parameters.
  """

  codec: codecs.Codec
  outer: optax.GradientTransformation
  treedef: Any
  likes: tuple[jax.ShapeDtypeStruct, ...]
  max_norm: float | None
  fragment: str | None

  @functools.cached_property
  def params_like(self) -> PyTree:
    """Shapes and dtypes of the parameters."""
    return self.treedef.unflatten(self.likes)

  @functools.cached_property
  def arrays(self) -> Partition:
    """Arrays that the parameters are encoded as."""
    return partition(self.codec, self.params_like)

  @functools.cached_property
  def plans(self) -> list[extend.ArrayPlan]:
    """Codec of each array, with the shape and dtype in which it is encoded."""
    return extend.plan_arrays(self.arrays, 1, "gather")

  @functools.cached_property
  def payload_likes(self) -> list[PyTree]:
    """Shapes and dtypes of the payloads of one contribution."""
    return [plan.codec.payload_like(plan.like) for plan in self.plans]

  @functools.cached_property
  def agreed_likes(self) -> PyTree:
    """Shapes and dtypes of an anchor and an outer state."""
    return self.params_like, jax.eval_shape(self.outer.init, self.params_like)

  @functools.cached_property
  def snapshot_changes(self) -> int:
    """Number of changes whose payloads take twice the bytes of a snapshot."""
    nbytes = core.tree_bytes(self.payload_likes)
    return math.ceil(2 * core.tree_bytes(self.agreed_likes) / max(1, nbytes))

  @functools.cached_property
  def config(self) -> dict[str, Any]:
    """Configuration of the codec, as the headers of objects have it."""
    # Islands that divide the model otherwise are told so.
    own = {} if self.fragment is None else {"fragment": self.fragment}
    return self.codec.config() | own

  def agree(self, round: int, anchor: PyTree, outer_state: PyTree) -> Agreed:
    """Returns what islands agree on in a round, with its checksum."""
    checksum = _message.checksum_arrays((anchor, outer_state))
    return Agreed(round, anchor, outer_state, checksum)

  def init_states(self) -> list[PyTree]:
    """Returns the codec's state of each array, of an island that begins."""
    return [plan.codec.init(plan.like) for plan in self.plans]

  def encode(
    self, agreed: Agreed, params: PyTree, states: list[PyTree], island: str
  ) -> tuple[list[PyTree], list[PyTree], Array]:
    """Encodes a change; returns payloads, states, and whether it is finite."""
    key = core.make_key(0, zlib.crc32(island.encode())).fold(agreed.round)
    return self._encode(agreed.anchor, params, states, key)

  @_compile
  def _encode(
    self, anchor: PyTree, params: PyTree, states: list[PyTree], key: core.Key
  ) -> tuple[list[PyTree], list[PyTree], Array]:
    """Does what `encode` does with the key of the island and the round."""
    change = jax.tree.map(lambda a, p: a - p, anchor, params)
    finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(change)]
    payloads, new_states = [], []
    for plan, x, state, own_key in zip(
      self.plans,
      self.arrays.split(change),
      states,
      self.arrays.array_keys(key),
      strict=True,
    ):
      x = core.saturate_cast(x, plan.like.dtype)
      payload, state = plan.codec.encode(x, state, own_key)
      payloads.append(payload)
      new_states.append(state)
    return payloads, new_states, jnp.stack(finite).all()

  def pack(self, agreed: Agreed, own: Contribution) -> bytes:
    """Returns the bytes of a contribution to a round."""
    header = self._describe(agreed, own.island, own.tokens)
    return _message.pack_message(header, jax.tree.leaves(own.payloads))

  def _describe(
    self, agreed: Agreed, island: str, tokens: Any
  ) -> dict[str, Any]:
    """Returns the header of a contribution."""
    return dict(
      kind="contribution",
      round=agreed.round,
      anchor=agreed.checksum,
      island=island,
      tokens=tokens,
      codec=self.config,
    )

  def unpack(self, data: bytes, agreed: Agreed, island: str) -> Contribution:
    """Reads the bytes of a contribution, or raises `MessageError`."""
    likes, treedef = jax.tree.flatten(self.payload_likes)
    header, arrays = _message.unpack_message(data, "contribution", likes)
    tokens: Any = header.get("tokens")
    if type(tokens) not in (int, float) or not 0 < tokens <= 2**63:
      raise MessageError(f"its tokens are {tokens!r:.80}")
    expected = self._describe(agreed, island, tokens)
    for name in header.keys() | expected.keys():
      if header.get(name) != expected.get(name):
        kind = OtherAnchorError if name == "anchor" else MessageError
        raise kind(f"its {name:.80} is {header.get(name)!r:.80}")
    return Contribution(island, tokens, jax.tree.unflatten(treedef, arrays))

  def check_change(self, own: Contribution) -> None:
    """Raises `MessageError` unless a change is finite and small enough."""
    norm = float(self._measure(own.payloads))
    if not math.isfinite(norm):
      raise MessageError("its change is not finite")
    if self.max_norm is not None and norm > self.max_norm:
      raise MessageError(
        f"its change has the norm {norm:.4g}, more than {self.max_norm:.4g}"
      )

  @_compile
  def _measure(self, payloads: list[PyTree]) -> Array:
    """Returns the L2 norm of a decoded change."""
    decoded = [
      plan.codec.decode(payload, plan.like).astype(jnp.float32)
      for plan, payload in zip(self.plans, payloads, strict=True)
    ]
    return optax.tree.norm(decoded)

  def apply(self, agreed: Agreed, accepted: Sequence[Contribution]) -> Agreed:
    """Returns what islands agree on after a round with these contributions."""
    # accepted: in the order on which all agree.
    if not accepted:
      return agreed._replace(round=agreed.round + 1)
    weights = find_weights([one.tokens for one in accepted])
    stacked = jax.tree.map(
      lambda *a: np.stack(a), *(one.payloads for one in accepted)
    )
    anchor, outer_state = self._update(
      agreed.anchor, agreed.outer_state, self._average(stacked, weights)
    )
    return self.agree(agreed.round + 1, anchor, outer_state)

  # Apart from the update, which is then compiled once for any number.
  @_compile
  def _average(self, stacked: list[PyTree], weights: Array | None) -> PyTree:
    """Returns the mean of stacked payloads, a tree like the parameters."""
    means = []
    for plan, like, payloads in zip(
      self.plans, self.arrays.array_likes(), stacked, strict=True
    ):
      workers = jax.tree.leaves(payloads)[0].shape[0]
      mean = _sum_weighted(plan, payloads, weights) / workers
      means.append(core.saturate_cast(mean, like.dtype))
    return self.arrays.merge(means)

  @_compile
  def _update(
    self, anchor: PyTree, outer_state: PyTree, mean: PyTree
  ) -> tuple[PyTree, PyTree]:
    """Returns the next anchor and outer state."""
    updates, outer_state = self.outer.update(mean, outer_state, anchor)
    return optax.apply_updates(anchor, updates), outer_state


def make_outer_step(
  params: PyTree,
  outer: optax.GradientTransformation,
  codec: codecs.Codec,
  max_norm: float | None,
  fragment: str | None = None,
) -> OuterStep:
  """Makes the outer step of parameters like these; raises for other codecs."""
  check_codec("codec", codec, trees=True, one_round=True)
  leaves, treedef = jax.tree.flatten(params)
  likes = tuple(map(core.shape_dtype, leaves))
  step = OuterStep(codec, outer, treedef, likes, max_norm, fragment)
  if any(plan.codec.needs_mean for plan in step.plans):
    raise ValueError(
      f"`codec` must be one whose memory needs no mean, got {codec!r}."
    )
  return step


def find_weights(tokens: Sequence[float]) -> np.ndarray[Any, Any] | None:
  """Returns factors of a mean, whose mean is 1; None if all are 1.

  >>> find_weights([3, 3]) is None, find_weights([1, 3]).tolist()
  (True, [0.5, 1.5])
  """
  # In exact arithmetic, so that neither a sum nor its order rounds.
  exact = list(map(Fraction, tokens))
  if len(set(exact)) == 1:
    return None
  mean = sum(exact) / len(exact)
  return np.array([float(t / mean) for t in exact], np.float32)


def _sum_weighted(
  plan: extend.ArrayPlan, payloads: PyTree, weights: Array | None
) -> Array:
  """Decodes payloads of an array and adds them, in their order."""
  if weights is None:
    # As `exchange` does it, with the same bits.
    return plan.codec.sum_decoded(payloads, plan.like)

  def decode(pair: tuple[PyTree, Array], like: jax.ShapeDtypeStruct) -> Array:
    payload, weight = pair
    return plan.codec.decode(payload, like) * weight

  return kernels.sum_decoded(decode, (payloads, weights), plan.like)


@jax.jit
def move_params(anchor: PyTree, params: PyTree, base: PyTree) -> PyTree:
  """Returns the anchor plus what parameters changed since a base."""

  def move_leaf(a: Array, p: Array, b: Array) -> Array:
    # Where nothing changed, the anchor's own bits: a sum turns -0 into 0.
    return jnp.where(p == b, a, a + (p - b))

  return jax.tree.map(move_leaf, anchor, params, base)
