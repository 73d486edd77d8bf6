"""Optimizer updates that decode and encode their state leaf by leaf."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, PyTree
from jaxmotion.memory import _memory_kind
from jaxmotion.memory.state import _encoded_leaf
from jaxmotion.program import Order, Value, evaluate, flatten, read_operand

# Parameters that may begin before the present one is done: the state of one is
# transferred from the host while another's update is computed.
_MAX_AHEAD = 1


def stream_update(
  update: Callable[[list[Any]], tuple[PyTree, list[Any]]],
  leaves: Sequence[Any],
  encode: Callable[[int, Array], _encoded_leaf.EncodedLeaf],
  on_host: bool,
) -> tuple[PyTree, list[Any]]:
  """Computes an update parameter by parameter: one array of `updates` a
  time."""
  # Traces `update` once on decoded leaves, then evaluates its outputs one by
  # one. For each array of `updates` it decodes the state leaves that the array
  # depends on and computes the array. It then computes the new values of those
  # leaves and encodes them.
  # Invariant: a leaf is decoded only after the new state of the last parameter
  # but one is encoded. An `optimization_barrier` ties the leaf's payload to the
  # first elements of those payloads. Without the barrier XLA may transfer from
  # the host, or decode, everything first, and the decoded state would be in
  # memory at once. The tie is not to the last parameter itself, so that a
  # transfer overlaps with one computation.
  # Returns `updates` and the new leaves.
  encoded = [i for i, x in enumerate(leaves) if _encoded_leaf.is_encoded(x)]

  def update_decoded(arrays: list[Array]) -> tuple[PyTree, list[Any]]:
    decoded = list(leaves)
    for i, a in zip(encoded, arrays, strict=True):
      decoded[i] = a
    return update(decoded)

  traced, (updates, _) = jax.make_jaxpr(update_decoded, return_shape=True)(
    [core.abstract_like(leaves[i].like) for i in encoded]
  )
  update_count = len(jax.tree.leaves(updates))
  new_leaves: dict[int, Any] = {}
  decoded_leaves: list[int] = []  # Decoded, and not encoded again yet.
  # For each parameter that decoded any state: the first element of each payload
  # that it has encoded.
  markers: list[list[Array]] = []

  def load_leaf(input_index: int) -> Array:
    i = encoded[input_index]
    decoded_leaves.append(i)
    x = leaves[i]
    if len(markers) > _MAX_AHEAD:
      payload, _ = lax.optimization_barrier(
        (x.payload, markers[-1 - _MAX_AHEAD])
      )
      x = dataclasses.replace(x, payload=payload)
    return (_encoded_leaf.move_to_device(x) if on_host else x).decode()

  outputs = _LazyOutputs(traced, load_leaf)

  def compute_output(output_index: int) -> Array:
    y = outputs.output(output_index)
    if decoded_leaves:
      markers.append([])
    while decoded_leaves:
      store_leaf(decoded_leaves.pop())
    return y

  def store_leaf(i: int) -> None:
    # Computing the new leaf may decode further leaves, which the loop in
    # `compute_output` then stores as well.
    x = encode(i, outputs.output(update_count + i))
    markers[-1].append(_first_element(x.payload))
    if on_host:
      x = dataclasses.replace(x, payload=_memory_kind.to_host(x.payload))
    new_leaves[i] = x

  new_updates = [compute_output(i) for i in range(update_count)]
  for i in range(len(leaves)):
    y = compute_output(update_count + i)
    if i not in encoded:
      new_leaves[i] = y
    elif i not in new_leaves:
      store_leaf(i)
  return jax.tree.unflatten(jax.tree.structure(updates), new_updates), [
    new_leaves[i] for i in range(len(leaves))
  ]


def _first_element(payload: PyTree) -> Array:
  return jax.tree.leaves(payload)[0].reshape(-1)[0]


class _LazyOutputs:
  """A traced function whose outputs are computed one by one, on demand.

  Each output runs the steps of the program that no output before it has run. An
  input is loaded when a step first reads it.

  Args:
    traced: the traced function.
    load_input: function from the position of an input to its array.
  """

  def __init__(
    self, traced: core.jax_core.ClosedJaxpr, load_input: Callable[[int], Array]
  ) -> None:
    program = flatten(traced)
    self._outputs, self._load_input = program.outputs, load_input
    self._order = Order(program.steps)
    self._input_index = {value: i for i, value in enumerate(program.inputs)}
    self._known = dict(program.constants)

  def output(self, i: int) -> Array:
    """Returns one output, and runs the steps that it still needs."""
    wanted = self._outputs[i]
    steps = self._order.leading_to([wanted], self._known)
    used = [wanted, *(v for step in steps for v in step.reads)]
    for value in used:
      if isinstance(value, Value) and value in self._input_index:
        if value not in self._known:
          self._known[value] = self._load_input(self._input_index[value])
    evaluate(steps, self._known)
    return read_operand(self._known, wanted)
