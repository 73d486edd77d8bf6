"""An update that decodes and encodes its state leaf by leaf."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from jaxmotion.core import Array, PyTree
from jaxmotion.memory._memory_kind import to_host
from jaxmotion.memory.residuals.trace import (
  Order,
  Value,
  evaluate,
  flatten,
  read,
)
from jaxmotion.memory.state._encoded_leaf import (
  EncodedLeaf,
  is_packed,
  on_device,
)

# Turns that may begin before the present one has ended: one parameter's state
# is on its way from the host while another's is computed.
_AHEAD = 1


def stream(
  update: Callable[[list[Any]], tuple[PyTree, list[Any]]],
  leaves: Sequence[Any],
  encode: Callable[[int, Array], EncodedLeaf],
  on_host: bool,
) -> tuple[PyTree, list[Any]]:
  """Computes an update in turns, one for each array of `updates`.

  A turn decodes the state that its array is made of, computes the array, and
  encodes what has become of that state. It is bound to the end of the last
  turn but one: a compiler that is free to copies from the host, or decodes,
  everything first.

  Args:
    update: from the leaves of a state to `updates` and the new leaves.
    leaves: of the state, some of them `EncodedLeaf`.
    encode: packs a new leaf, given its position.
    on_host: whether what is packed is on the host and goes back there.

  Returns:
    `updates` and the new leaves.
  """
  packed = [i for i, x in enumerate(leaves) if is_packed(x)]

  def of_arrays(arrays: list[Array]) -> tuple[PyTree, list[Any]]:
    own = list(leaves)
    for i, a in zip(packed, arrays, strict=True):
      own[i] = a
    return update(own)

  traced, (updates, _) = jax.make_jaxpr(of_arrays, return_shape=True)(
    [leaves[i].like for i in packed]
  )
  count = len(jax.tree.leaves(updates))
  new: dict[int, Any] = {}
  brought: list[int] = []
  ends: list[list[Array]] = []

  def bring(k: int) -> Array:
    brought.append(packed[k])
    x = leaves[packed[k]]
    if len(ends) > _AHEAD:
      bound = lax.optimization_barrier((x.payload, ends[-1 - _AHEAD]))
      x = dataclasses.replace(x, payload=bound[0])
    return (on_device(x) if on_host else x).decode()

  parts = _Parts(traced, bring)

  def turn(i: int) -> Array:
    y = parts.output(i)
    if brought:
      ends.append([])
    while brought:
      put_back(brought.pop())
    return y

  def put_back(i: int) -> None:
    x = encode(i, parts.output(count + i))
    ends[-1].append(_first_word(x.payload))
    new[i] = (
      dataclasses.replace(x, payload=to_host(x.payload)) if on_host else x
    )

  done = [turn(i) for i in range(count)]
  for i in range(len(leaves)):
    y = turn(count + i)
    if i not in packed:
      new[i] = y
    elif i not in new:
      put_back(i)
  return jax.tree.unflatten(jax.tree.structure(updates), done), [
    new[i] for i in range(len(leaves))
  ]


def _first_word(payload: PyTree) -> Array:
  return jax.tree.leaves(payload)[0].reshape(-1)[0]


class _Parts:
  """A traced function whose outputs are computed one by one.

  Each computes what no other before it has needed; an input is asked for when
  it is first read.
  """

  def __init__(
    self, traced: core.ClosedJaxpr, load: Callable[[int], Array]
  ) -> None:
    program = flatten(traced)
    self._outputs, self._load = program.outputs, load
    self._order = Order(program.steps)
    self._place = {value: i for i, value in enumerate(program.inputs)}
    self._known = dict(program.constants)

  def output(self, i: int) -> Array:
    """Returns one output."""
    end = self._outputs[i]
    steps = self._order.leading_to([end], self._known)
    used = [end, *(v for step in steps for v in step.reads())]
    for value in used:
      if isinstance(value, Value) and value in self._place:
        if value not in self._known:
          self._known[value] = self._load(self._place[value])
    evaluate(steps, self._known)
    return read(self._known, end)
