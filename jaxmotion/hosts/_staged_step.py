"""Step of several programs, which sends gradients while it computes others.

The traced step is cut at its collectives. This thread dispatches the programs
that compute, and second threads those that send. The gradients of the last
layers are on the link while those of earlier layers are computed and encoded.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from jaxmotion.hosts import _sender, _sending, _stages, _swap_bytes

# More pieces hide more of the link, and cost more messages.
_MOST_PIECES = 3


class _Program(NamedTuple):
  """Describes one jitted program of a step.

  Attributes:
    stage: what it reads, makes and sends.
    run: the program.
    queue: which sender dispatches it; None is this thread.
    drops: numbers of the arrays that no later program reads.
  """

  stage: _stages.Stage
  run: Callable[..., Any]
  queue: int | None
  drops: tuple[int, ...]


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
  ):
    # step: to be traced; it takes `sending=`, a `Sending`. jitted: the same as
    # one program, for one that sends nothing.
    self._step, self._jitted = step, jitted
    # donated: number of arguments whose buffers the step takes.
    self._mesh, self._donated = mesh, donated
    # Two workers have two queues. What the second one sends names the devices
    # in reversed order, for which gloo opens connections of their own. Two
    # messages are on the link at a time, so that round trips of one hide behind
    # the other.
    self._meshes = [mesh]
    if mesh.size == 2:
      devices = mesh.devices.reshape(-1)[::-1].reshape(mesh.devices.shape)
      self._meshes.append(
        Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
      )
    self._senders = [_sender.Sender(mesh, q) for q in range(len(self._meshes))]
    self._plans: dict[Any, _Plan | None] = {}
    self._swap_bytes: float | None = None

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Runs the step; returns when all that it sends has arrived."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    signature = (treedef, *map(jax.typeof, leaves))
    if signature not in self._plans:
      self._plans[signature] = self._make_plan(args, kwargs)
    plan = self._plans[signature]
    if plan is None:
      return self._jitted(*args, **kwargs)
    arrays = dict(zip(plan.stages.inputs, leaves, strict=True))
    arrays |= plan.stages.constants
    sent: list[Any] = []
    try:
      for program in plan.programs:
        operands = [arrays[i] for i in program.stage.reads]
        made = self._dispatch(program, operands)
        arrays.update(zip(program.stage.makes, made, strict=True))
        if program.queue is not None:
          sent.append(made)
        for i in program.drops:
          del arrays[i]
    finally:
      # The caller may send as soon as this function ends, after an error too.
      jax.block_until_ready(sent)
    for leaf in jax.tree.leaves(args[: self._donated]):
      if isinstance(leaf, jax.Array):
        leaf.delete()  # No program could write to it.
    outputs = [arrays[i] for i in plan.stages.outputs]
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
    # The link is measured before the first step, because short messages over a
    # slow round trip are swapped and not added.
    if self._swap_bytes is None:
      self._swap_bytes = _swap_bytes.measure_swap_bytes(
        self._mesh, self._senders[0]
      )
    sending = _sending.Sending(_MOST_PIECES, self._swap_bytes)

    def run_step(*args: Any, **kwargs: Any) -> Any:
      return self._step(*args, **kwargs, sending=sending)

    closed, shapes = jax.make_jaxpr(run_step, return_shape=True)(
      *args, **kwargs
    )
    stages = _stages.cut_at_collectives(closed, self._mesh)
    if stages is None:
      return None
    count = len(jax.tree.leaves(args[: self._donated]))
    heirs = _find_heirs(stages, count, closed)
    programs = self._jit_all(stages, heirs)
    return _Plan(stages, programs, jax.tree.structure(shapes))

  def _jit_all(
    self, stages: _stages.Stages, heirs: dict[int, int]
  ) -> tuple[_Program, ...]:
    last: dict[int, int] = {}
    for index, stage in enumerate(stages.programs):
      last.update(dict.fromkeys(stage.reads, index))
    programs: list[_Program] = []
    turn = 0
    for index, stage in enumerate(stages.programs):
      ends = [i for i in stage.reads if last[i] == index]
      queue = None
      if stage.sends:
        queue = turn % len(self._senders) if stage.is_symmetric else 0
        turn += 1
      given = [
        position
        for position, i in enumerate(stage.reads)
        if i in ends and heirs.get(i) in stage.makes
      ]
      run = self._jit(stage, queue or 0, given)
      programs.append(_Program(stage, run, queue, tuple(ends)))
    return tuple(programs)

  def _jit(
    self, stage: _stages.Stage, queue: int, given: Sequence[int]
  ) -> Callable[..., Any]:
    mesh = self._meshes[queue]

    def run(*arrays: Any) -> list[Any]:
      return stage.run(*arrays, mesh=mesh)

    return jax.jit(run, donate_argnums=tuple(given))


def _find_heirs(
  stages: _stages.Stages, donated: int, closed: Any
) -> dict[int, int]:
  """Returns the number of the result that takes each donated argument's
  buffer."""
  # Those of `jax.jit`: the next result of the same shape and dtype, in order.
  # So a parameter's buffer goes to the new value of that parameter.
  free: dict[Any, list[int]] = {}
  for i, aval in zip(stages.outputs, closed.out_avals, strict=True):
    free.setdefault((aval.shape, aval.dtype), []).append(i)
  heirs = {}
  for i, aval in zip(stages.inputs[:donated], closed.in_avals, strict=False):
    results = free.get((aval.shape, aval.dtype))
    if results:
      heirs[i] = results.pop(0)
  return heirs


def _move(x: jax.Array, mesh: Mesh) -> jax.Array:
  """Returns the same buffer as an array on another order of the devices."""
  # A sum has no use for the order of its terms' rows.
  assert isinstance(x.sharding, NamedSharding)
  return jax.make_array_from_single_device_arrays(
    x.shape, NamedSharding(mesh, x.sharding.spec), [x.addressable_data(0)]
  )
