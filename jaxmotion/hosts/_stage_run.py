"""Runs some steps of a traced program, inside and outside of its maps."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P

from jaxmotion import core, program

_SUMS = frozenset("psum psum2 psum_invariant".split())


class Map(NamedTuple):
  """Describes a `shard_map` over all axes of workers.

  Attributes:
    step: the map, seen from outside.
    body: its function, flat.
  """

  step: program.Step
  body: program.Program

  @property
  def axis_names(self) -> frozenset[Any]:
    """Axes that the map is over, as the arrays inside tell."""
    return frozenset(self.body.inputs[0].aval.sharding.mesh.manual_axes)

  def stacked_axes(self, value: program.Value) -> tuple[Any, ...]:
    """Returns the axes over which a value of the inside may differ."""
    # Another program gets it with a leading axis of the workers along these.
    params, axes = self.step.params, self.axis_names
    if params["check_vma"]:
      axes = core.varying_axes(value.aval)
    return tuple(name for name in params["mesh"].axis_names if name in axes)


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

  @property
  def sends(self) -> bool:
    """Whether it is a collective, or holds one."""
    return self.leave is None and program.is_sending(self.step.eqn)

  def is_marked(self, name: str) -> bool:
    """Says whether it marks its result by a name."""
    return self.leave is None and self.step.params.get("name") == name


@dataclasses.dataclass(eq=False)
class Stage:
  """Holds one program of a step, over the mesh of its maps.

  Attributes:
    nodes: what it runs, in order.
    reads: values that it takes, in their order.
    makes: values that it returns, in their order.
    sends: whether a thread that sends dispatches it.
    origin: what each argument of a map's function is outside.
  """

  nodes: Sequence[Node]
  reads: list[program.Value]
  makes: list[program.Value]
  sends: bool
  origin: dict[program.Value, program.Operand]

  @property
  def is_symmetric(self) -> bool:
    """Whether all it sends is the same in any order of two workers."""
    return all(_is_symmetric(node.step) for node in self.nodes if node.sends)

  def run(self, *arrays: Any, mesh: Mesh | None = None) -> list[Any]:
    """Returns what it makes, on the mesh of its maps or on another order."""
    env: dict[program.Value, Any] = dict(zip(self.reads, arrays, strict=True))
    for _, group in itertools.groupby(self.nodes, lambda n: id(n.home)):
      nodes = list(group)
      home = nodes[0].home
      if home is None:
        program.evaluate([node.step for node in nodes], env)
      else:
        self._run_map(home, nodes, env, mesh or home.step.params["mesh"])
    return [env[value] for value in self.makes]

  def _run_map(
    self,
    home: Map,
    nodes: Sequence[Node],
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
    specs |= dict.fromkeys(home.body.constants, P())
    handed = [v for v in self.makes if v in made]

    def spec_of(value: program.Value) -> P:
      axes = home.stacked_axes(value)
      return P(axes) if axes else P()

    def run_own(*own: Any) -> tuple[list[Any], list[Any]]:
      inner: dict[program.Value, Any] = {}
      for value, x in zip(read, own, strict=True):
        is_row = value not in specs and home.stacked_axes(value)
        inner[value] = jnp.squeeze(x, 0) if is_row else x
      program.evaluate(steps, inner)
      results = [program.read_operand(inner, leave.inner) for leave in leaves]
      rows = [
        jnp.expand_dims(inner[v], 0) if home.stacked_axes(v) else inner[v]
        for v in handed
      ]
      return results, rows

    outside = {v: self.origin.get(v, v) for v in read}
    operands = [program.read_operand(env, outside[v]) for v in read]
    results, rows = jax.shard_map(
      run_own,
      mesh=mesh,
      in_specs=tuple(specs[v] if v in specs else spec_of(v) for v in read),
      out_specs=(
        [params["out_specs"][leave.position] for leave in leaves],
        [spec_of(v) for v in handed],
      ),
      axis_names=home.axis_names,
      check_vma=params["check_vma"],
    )(*operands)
    env.update(
      (leave.outer, x) for leave, x in zip(leaves, results, strict=True)
    )
    env.update(zip(handed, rows, strict=True))


def _is_symmetric(step: program.Step) -> bool:
  """Says whether a collective is a sum or a swap of two workers."""
  if step.name == "ppermute":
    return sorted(step.params["perm"]) == [(0, 1), (1, 0)]
  groups = step.params.get("axis_index_groups")
  return step.name in _SUMS and groups is None
