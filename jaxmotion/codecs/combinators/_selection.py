"""The elements that a payload of selected ones holds."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion.codecs import _codec
from jaxmotion.codecs.combinators import _chain, _feedback
from jaxmotion.codecs.sparse import _tiles
from jaxmotion.core import Array, PyTree, ShapedLike


def find_selection(codec: _codec.Codec) -> _codec.Codec:
  """Returns the codec, inside of others, that decides what is sent."""
  if isinstance(codec, _feedback.feedback):
    return find_selection(codec.codec)
  if isinstance(codec, _chain.chain):
    return find_selection(_without_tiles(codec)[1])
  return codec


def selects_elements(codec: _codec.Codec) -> bool:
  """Returns whether a codec sends some elements and leaves others out."""
  selection = find_selection(codec)
  return selection.laws.projects and not selection.linear


def mark_sent(codec: _codec.Codec, payload: PyTree, like: ShapedLike) -> Array:
  """Returns 1 at the elements that a payload holds, and 0 elsewhere."""
  if isinstance(codec, _feedback.feedback):
    return mark_sent(codec.codec, payload, like)
  if isinstance(codec, _chain.chain):
    heads, selection = _without_tiles(codec)
    outer: list[Any] = []
    likes = [like]
    for head in heads:
      likes.append(head.payload_like(likes[-1]).values)
      outer.append(payload)
      payload = payload.values
    marks = mark_sent(selection, payload, likes[-1])
    for head, own, own_like in zip(
      heads[::-1], outer[::-1], likes[-2::-1], strict=True
    ):
      marks = head.decode(own._replace(values=marks), own_like)
    return marks
  values = codec.payload_like(like).values
  ones = jax.tree.map(lambda a: jnp.ones(a.shape, jnp.float32), values)
  return codec.decode(payload._replace(values=ones), like)


def _without_tiles(
  codec: _chain.chain,
) -> tuple[list[_codec.Codec], _codec.Codec]:
  """Returns the permutations at a chain's head, and the codec after them."""
  count = 0
  while (
    isinstance(codec.codecs[count], _tiles.tiles) and codec.codecs[count + 1 :]
  ):
    count += 1
  return list(codec.codecs[:count]), codec.codecs[count]
