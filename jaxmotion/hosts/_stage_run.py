"""Runs some steps of a traced program, inside and outside of its maps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P

from jaxmotion import core, program


class Map(NamedTuple):
  """Describes a `shard_map` over all axes of a mesh.

  Attributes:
    step: the map, seen from outside.
    body: its function, flat.
  """

  step: program.Step
  body: program.Program

  def is_stacked(self, value: program.Value) -> bool:
    """Says whether a value of the inside may differ between workers."""
    # Then another program gets it with a leading axis of workers.
    return not self.step.params["check_vma"] or bool(
      core.varying_axes(value.aval)
    )


class Leave(NamedTuple):
  """Describes a result of a map.

  Attributes:
    position: among the results.
    inner: the value inside.
    outer: the value outside.
  """

  position: int
  inner: program.Operand
  outer: program.Value


class Node(NamedTuple):
  """Describes a step of a program.

  Attributes:
    home: the map that it is in; None outside of maps.
    step: the step, or the map if the node hands out a result.
    leave: the result that it hands out, or None.
  """

  home: Map | None
  step: program.Step
  leave: Leave | None = None

  @property
  def reads(self) -> tuple[program.Value, ...]:
    """Values that the node reads."""
    if self.leave is None:
      return self.step.reads
    inner = self.leave.inner
    return (inner,) if isinstance(inner, program.Value) else ()

  @property
  def outs(self) -> tuple[program.Value, ...]:
    """Values that it makes."""
    return self.step.outs if self.leave is None else (self.leave.outer,)


class StageRun:
  """Runs some steps as one program."""

  def __init__(
    self,
    nodes: Sequence[Node],
    reads: Sequence[program.Value],
    mesh: Mesh,
    origin: dict[program.Value, program.Operand],
  ):
    # reads: values that the program takes, in their order. mesh: that of all
    # maps. origin: what each argument of a map's function is outside.
    self.reads = tuple(reads)
    self._nodes, self._mesh, self._origin = tuple(nodes), mesh, origin

  def bind(self, makes: Sequence[program.Value]) -> Callable[..., list[Any]]:
    """Returns the program as a function of arrays, on any order of devices."""
    makes = tuple(makes)

    def run(*arrays: Any, mesh: Mesh = self._mesh) -> list[Any]:
      env: dict[program.Value, Any] = dict(zip(self.reads, arrays, strict=True))
      for home, nodes in self._split_by_map():
        if home is None:
          program.evaluate([node.step for node in nodes], env)
        else:
          self._run_map(home, nodes, makes, env, mesh)
      return [env[value] for value in makes]

    return run

  def _split_by_map(self) -> list[tuple[Map | None, list[Node]]]:
    found: list[tuple[Map | None, list[Node]]] = []
    for node in self._nodes:
      if not found or found[-1][0] is not node.home:
        found.append((node.home, []))
      found[-1][1].append(node)
    return found

  def _run_map(
    self,
    home: Map,
    nodes: Sequence[Node],
    makes: Iterable[program.Value],
    env: dict[program.Value, Any],
    mesh: Mesh,
  ) -> None:
    """Runs steps of one map, and adds what they make to `env`."""
    params = home.step.params
    steps = [node.step for node in nodes if node.leave is None]
    leaves = [node.leave for node in nodes if node.leave is not None]
    made = {v for step in steps for v in step.outs}
    read = dict.fromkeys(v for n in nodes for v in n.reads if v not in made)
    specs = dict(zip(home.body.inputs, params["in_specs"], strict=True))
    stacked = P(tuple(mesh.axis_names))

    def spec_of(value: program.Value) -> P:
      return stacked if home.is_stacked(value) else P()

    handed = [v for v in makes if v in made]

    def run_own(*own: Any) -> tuple[list[Any], list[Any]]:
      inner: dict[program.Value, Any] = {}
      for value, x in zip(read, own, strict=True):
        is_row = value not in specs and home.is_stacked(value)
        inner[value] = jnp.squeeze(x, 0) if is_row else x
      program.evaluate(steps, inner)
      results = [program.read_operand(inner, leave.inner) for leave in leaves]
      rows = [
        jnp.expand_dims(inner[v], 0) if home.is_stacked(v) else inner[v]
        for v in handed
      ]
      return results, rows

    outside = {v: self._origin.get(v, v) for v in read}
    operands = [program.read_operand(env, outside[v]) for v in read]
    results, rows = jax.shard_map(
      run_own,
      mesh=mesh,
      in_specs=tuple(specs[v] if v in specs else spec_of(v) for v in read),
      out_specs=(
        [params["out_specs"][leave.position] for leave in leaves],
        [spec_of(v) for v in handed],
      ),
      check_vma=params["check_vma"],
    )(*operands)
    env.update(
      (leave.outer, x) for leave, x in zip(leaves, results, strict=True)
    )
    env.update(zip(handed, rows, strict=True))
