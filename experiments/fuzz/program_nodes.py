"""Generated programs: random trees of operations, and their evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.fuzz import program_ops
from jaxmotion.core import Array, PyTree

_NARROW = ("bfloat16", "float16")


class Node(NamedTuple):
  """One operation of a program.

  Attributes:
    name: its name in `OPERATIONS` or `CONTAINERS`.
    left: position of the first operand among the values so far.
    right: position of the second operand.
    body: operations inside of a container.
  """

  name: str
  left: int
  right: int
  body: tuple[Node, ...] = ()

  def __repr__(self) -> str:
    inner = f", {list(self.body)}" if self.body else ""
    return f"{self.name}({self.left}, {self.right}{inner})"

  def is_narrow(self) -> bool:
    """Says whether the operation, or one inside of it, narrows its floats."""
    return self.name in _NARROW or any(node.is_narrow() for node in self.body)


def make_nodes(
  rng: np.random.Generator, count: int, depth: int = 1
) -> tuple[Node, ...]:
  """Returns random operations as nodes of a program."""
  nodes = []
  for i in range(count):
    # The last value is read more often than others: programs are deep.
    left = int(rng.integers(-1, i + 1)) if rng.random() < 0.4 else i
    right = int(rng.integers(0, i + 1))
    if depth and rng.random() < 0.25:
      name = str(rng.choice(list(program_ops.CONTAINERS)))
      body = make_nodes(rng, int(rng.integers(1, 4)), depth - 1)
      nodes.append(Node(name, max(left, 0), right, body))
    else:
      name = str(rng.choice(list(program_ops.OPERATIONS)))
      nodes.append(Node(name, max(left, 0), right))
  return tuple(nodes)


def run_nodes(nodes: Sequence[Node], env: program_ops.Env, x: Array) -> Array:
  """Returns the value of the last operation."""
  values = [x]
  for node in nodes:
    left, right = values[node.left], values[node.right]
    if node.body:
      # What is appended inside of a loop or a branch must not leave it.
      inner = env._replace(aux=[])

      def body(
        x: Array, node: Node = node, inner: program_ops.Env = inner
      ) -> Array:
        return run_nodes(node.body, inner, x)

      values.append(program_ops.CONTAINERS[node.name](env, body, left, right))
    else:
      values.append(program_ops.OPERATIONS[node.name](env, left, right))
  return values[-1]


def make_params(rng: np.random.Generator) -> dict[str, Array]:
  """Returns parameters that operations read, and one that none does."""
  shapes = {
    "w": (64, 64),
    "b": (64,),
    "k": (3, 3, 4, 4),
    "stack": (3, 64, 64),
    "unused": (3,),
  }
  scale = {"w": 0.1, "b": 1.0, "k": 0.15, "stack": 0.1, "unused": 1.0}
  return {
    name: jnp.asarray(rng.normal(0, scale[name], shape), jnp.float32)
    for name, shape in shapes.items()
  }


def make_data(rng: np.random.Generator) -> tuple[Array, Array, Array]:
  """Returns a matrix, rows of it, and a random key."""
  x = jnp.asarray(rng.normal(0, 1, program_ops.SHAPE), jnp.float32)
  ids = jnp.asarray(rng.integers(0, 32, 32), jnp.int32)
  return x, ids, jax.random.key(int(rng.integers(2**31)))


def make_loss(
  nodes: Sequence[Node], wrap: Callable[[Any], Any]
) -> Callable[..., tuple[Array, PyTree]]:
  """Returns a function that ends in a scalar, with further results."""

  def loss(
    params: PyTree, x: Array, ids: Array, key: Array, nothing: None
  ) -> tuple[Array, PyTree]:
    del nothing
    env = program_ops.Env(params, ids, key, [], wrap)
    y = run_nodes(nodes, env, x).astype(jnp.float32)
    others = {"integers": env.aux, "twice": (y, y), "x": x, "one": 1}
    return jnp.mean(jnp.square(y)), others

  return loss
