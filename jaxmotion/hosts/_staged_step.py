"""Step of several programs, which sends gradients while it computes others.

The traced step is cut at its collectives. This thread dispatches the programs
that compute, and second threads those that send. The gradients of the last
layers are on the link while those of earlier layers are computed and encoded.

A step may also be cut in two: this thread computes what the next step needs,
and a second one all else. That may be in flight when the step returns.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from jaxmotion.hosts import _sender, _sending, _stages, _swap_bytes

# More pieces hide more of the link, and cost more messages.
_MOST_PIECES = 3


class _Program(NamedTuple):
  """Describes one jitted program of a step.

  Attributes:
    stage: the stage of the step, which says what it reads, makes and sends.
    run: the program.
    queue: which sender dispatches it; None is this thread.
    drops: the arrays that no later program reads.
  """

  stage: Any
  run: Callable[..., Any]
  queue: int | None
  drops: tuple[Any, ...]


class _Plan(NamedTuple):
  """Lists the programs of a step for arguments of some shapes."""

  stages: _stages.Stages
  programs: tuple[_Program, ...]
  treedef: Any


class StagedStep:
  """Calls a step as several programs of two or three threads."""

  def __init__(
    self,
    step: Callable[..., Any],
    jitted: Callable[..., Any],
    mesh: Mesh,
    donated: int,
    own: Callable[[Any], Any] | None = None,
  ):
    # step: to be traced; it takes `sending=`, a `Sending`. jitted: the same as
    # one program, for one that sends nothing.
    self._step, self._jitted = step, jitted
    # donated: number of arguments whose buffers the step takes.
    self._mesh, self._donated = mesh, donated
    # own: selects of the results what the next step needs; all else may be in
    # flight when the step returns. None: nothing is in flight then.
    self._own = own
    # Two workers have two queues. What the second one sends names the devices
    # in reversed order, for which gloo opens connections of their own. Two
    # messages are on the link at a time, so that round trips of one hide behind
    # the other.
    self._meshes = [mesh]
    if mesh.size == 2 and own is None:
      devices = mesh.devices.reshape(-1)[::-1].reshape(mesh.devices.shape)
      self._meshes.append(
        Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
      )
    self._senders = [_sender.Sender(mesh, q) for q in range(len(self._meshes))]
    self._plans: dict[Any, _Plan | None] = {}

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Runs the step; without `own`, all has arrived when it returns."""
    # With `own`, the caller gives `sending=`, whose phase is static: each phase
    # has programs of its own.
    leaves, treedef = jax.tree.flatten((args, kwargs))
    signature = (treedef, *map(jax.typeof, leaves))
    if signature not in self._plans:
      self._plans[signature] = self._make_plan(args, kwargs)
    plan = self._plans[signature]
    if plan is None:
      run = functools.partial(self._jitted, *args, **kwargs)
      return run() if self._own is None else self._senders[0].send(run)
    arrays = dict(zip(plan.stages.inputs, leaves, strict=True))
    arrays |= plan.stages.constants
    sent: list[Any] = []
    try:
      for program in plan.programs:
        operands = [arrays[v] for v in program.stage.reads]
        made = self._dispatch(program, operands)
        arrays.update(zip(program.stage.makes, made, strict=True))
        if program.queue is not None:
          sent.append(made)
        for value in program.drops:
          del arrays[value]
    finally:
      # The caller may send as soon as this function ends, after an error too.
      if self._own is None:
        jax.block_until_ready(sent)
    outputs = [arrays[v] for v in plan.stages.outputs]
    kept = set(map(id, outputs))
    for leaf in jax.tree.leaves(args[: self._donated]):
      if isinstance(leaf, jax.Array) and id(leaf) not in kept:
        leaf.delete()  # No program could write to it.
    return jax.tree.unflatten(plan.treedef, outputs)

  def _dispatch(self, program: _Program, operands: list[Any]) -> Any:
    queue = program.queue
    if queue is None:
      return program.run(*operands)
    if not queue:
      return self._senders[0].send(program.run, *operands)
    operands = [_move(x, self._meshes[queue]) for x in operands]
    made = self._senders[queue].send(program.run, *operands)
    return [_move(x, self._mesh) for x in made]

  def _make_plan(
    self, args: tuple[Any, ...], kwargs: dict[str, Any]
  ) -> _Plan | None:
    if self._own is None:
      kwargs = kwargs | {"sending": self._in_pieces}
    trace = jax.make_jaxpr(self._step, return_shape=True)
    closed, shapes = trace(*args, **kwargs)
    treedef = jax.tree.structure(shapes)
    if self._own is None:
      stages = _stages.cut_at_collectives(closed)
    else:
      numbers = jax.tree.unflatten(treedef, range(len(closed.out_avals)))
      own = jax.tree.leaves(self._own(numbers))
      stages = _stages.cut_for_flight(closed, own)
    if stages is None:
      return None
    count = len(jax.tree.leaves(args[: self._donated]))
    programs = self._jit_all(stages, _find_heirs(stages, count))
    return _Plan(stages, programs, treedef)

  @functools.cached_property
  def _in_pieces(self) -> _sending.Sending:
    # The link is measured before the first step, because short messages over a
    # slow round trip are swapped and not added.
    return _sending.Sending(
      _MOST_PIECES,
      _swap_bytes.measure_swap_bytes(self._mesh, self._senders[0]),
    )

  def _jit_all(
    self, stages: _stages.Stages, heirs: dict[Any, Any]
  ) -> tuple[_Program, ...]:
    last: dict[Any, int] = {}
    for index, stage in enumerate(stages.programs):
      last.update(dict.fromkeys(stage.reads, index))
    programs: list[_Program] = []
    turn = 0
    for index, stage in enumerate(stages.programs):
      ends = [
        v for v in stage.reads if last[v] == index and v not in stages.outputs
      ]
      queue = None
      if stage.sends:
        queue = turn % len(self._senders) if stage.is_symmetric else 0
        turn += 1
      given = [
        position
        for position, v in enumerate(stage.reads)
        if v in ends and heirs.get(v) in stage.makes
      ]
      on_mesh = functools.partial(stage.run, mesh=self._meshes[queue or 0])
      run = jax.jit(on_mesh, donate_argnums=given)
      programs.append(_Program(stage, run, queue, tuple(ends)))
    return tuple(programs)


def _find_heirs(stages: _stages.Stages, donated: int) -> dict[Any, Any]:
  """Returns the result that takes each donated argument's buffer."""
  # Those of `jax.jit`: the next result of the same shape and dtype, in order.
  # So a parameter's buffer goes to the new value of that parameter.
  free: dict[Any, list[Any]] = {}
  for v in stages.outputs:
    free.setdefault((v.shape, v.dtype), []).append(v)
  heirs = {}
  for v in stages.inputs[:donated]:
    if results := free.get((v.shape, v.dtype)):
      heirs[v] = results.pop(0)
  return heirs


def _move(x: jax.Array, mesh: Mesh) -> jax.Array:
  """Returns the same buffer as an array on another order of the devices."""
  # A sum has no use for the order of its terms' rows.
  assert isinstance(x.sharding, NamedSharding)
  return jax.make_array_from_single_device_arrays(
    x.shape, NamedSharding(mesh, x.sharding.spec), [x.addressable_data(0)]
  )
