"""Programs that update parameters with plain or encoded optimizer state."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import optax

from jaxmotion import codecs, memory
from jaxmotion.core import PyTree

PACKINGS: dict[str, dict[str, Any]] = {
  "plain": dict.fromkeys(("first", "second", "sums"), codecs.identity()),
  "packed": {},
}
"""Arguments of `memory.compress_state` by the name of the packing."""

OPTIMIZERS: dict[str, optax.GradientTransformation] = {
  "adam": optax.adam(1e-3),
  "adagrad": optax.adagrad(1e-2),
  "adafactor": optax.adafactor(
    1e-3, momentum=0.9, multiply_by_parameter_scale=False
  ),
}
"""Optimizers by name; the first one's state is also kept on the host."""


class UpdateProgram(NamedTuple):
  """A program that updates parameters.

  Attributes:
    optimizer: name of the optimizer, a key of `OPTIMIZERS`.
    case: name of the packing and of the place of the state.
    fn: function of parameters, gradients and state.
    tx: optimizer that initializes the state.
    donated: positions of donated arguments.
  """

  optimizer: str
  case: str
  fn: Callable[..., Any]
  tx: optax.GradientTransformation
  donated: tuple[int, ...]


def list_programs() -> Iterator[UpdateProgram]:
  """Yields the programs: state on the device, on the host naively, and ours."""
  for (optimizer, tx), (name, options) in itertools.product(
    OPTIMIZERS.items(), PACKINGS.items()
  ):
    on_device = memory.compress_state(tx, min_leaf_size=0, **options)
    step = functools.partial(step_on_device, on_device)
    yield UpdateProgram(optimizer, name, step, on_device, (0, 2))
    if optimizer != next(iter(OPTIMIZERS)):
      continue
    on_host = memory.compress_state(
      tx, min_leaf_size=0, memory_kind="pinned_host", **options
    )
    naive = functools.partial(step_on_host, on_device, True)
    yield UpdateProgram(optimizer, f"{name}_host_naive", naive, on_device, (0,))
    ours = functools.partial(step_on_host, on_host, False)
    yield UpdateProgram(optimizer, f"{name}_host", ours, on_host, (0,))


def step_on_device(
  tx: optax.GradientTransformation, params: PyTree, grads: PyTree, state: PyTree
) -> tuple[PyTree, PyTree]:
  """Runs one step and returns the parameters and the state."""
  updates, state = tx.update(grads, state, params)
  return optax.apply_updates(params, updates), state


def step_on_host(
  tx: optax.GradientTransformation,
  naive: bool,
  params: PyTree,
  grads: PyTree,
  state: PyTree,
) -> tuple[PyTree, PyTree]:
  """Runs two steps with the state in host memory between them."""
  # A scan carries the state, because the arguments of a program that is only
  # compiled are on the device.

  def step(carry: tuple[PyTree, PyTree], _: None) -> tuple[Any, None]:
    params, state = carry
    state = _move_state(state, jax.memory.Space.Device) if naive else state
    params, state = step_on_device(tx, params, grads, state)
    state = _move_state(state, jax.memory.Space.Host) if naive else state
    return (params, state), None

  carry = params, _move_state(state, jax.memory.Space.Host)
  return jax.lax.scan(step, carry, None, length=2)[0]


def _move_state(state: PyTree, space: Any) -> PyTree:
  """Returns the state with its encoded leaves in another memory."""

  def move_leaf(x: Any) -> Any:
    if not isinstance(x, memory.EncodedLeaf):
      return x
    payload = jax.tree.map(lambda a: jax.device_put(a, space), x.payload)
    return dataclasses.replace(x, payload=payload)

  is_encoded = lambda x: isinstance(x, memory.EncodedLeaf)
  return jax.tree.map(move_leaf, state, is_leaf=is_encoded)
