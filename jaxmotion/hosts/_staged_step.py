"""Step of several programs, which sends gradients while it computes others.

XLA:CPU runs the programs that one thread has dispatched one after the other. A
collective and independent computations of one program take the sum of their
times. The programs of two threads run beside one another and take the longer of
both times. So a step that overlaps on CPU hosts dispatches what sends from a
thread of its own, and what computes from the caller's thread.

The traced step is cut at its collectives. The gradients of the last layers are
on the link while those of earlier layers are computed and encoded. A step may
also be cut in two: the caller's thread computes what the next step needs, and
the second one all else. That may be in flight when the step returns.
"""

import collections
import concurrent.futures
import functools
import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from jaxmotion import core
from jaxmotion.core import AxisName, PyTree
from jaxmotion.hosts import _sending, _stages

OVERLAPS = (None, "program", "thread")
# More pieces hide more of the link, and cost more messages.
_MOST_PIECES = 3
# Bytes of the messages that are timed. A router's buffer may take some 100 KB
# of the medium one at once, so the long one follows unless the link is slow.
_SHORT, _MEDIUM, _LONG = 4, 1 << 18, 1 << 21
_SLOW = 8
# The first messages open connections and widen TCP's windows.
_WARM_UP, _REPEATS = 2, 4
# Shortest difference of two times, in seconds, that is no noise.
_LEAST = 1e-4
# So few bytes are gathered otherwise, in one round trip, too. Gathers take one
# queue. On busy cores a step with swaps in two queues took up to 4 ms longer.
_GATHERED = 1 << 18
# XLA:CPU allows 32 programs in flight on each device. A loop may run programs
# of its own between two steps, such as a sum of losses. Fewer steps are slower:
# the host could not prepare the next step during the last.
_MAX_STEPS = 4


class Sender:
  """Dispatches programs that send, from the second thread of this process."""

  # There is one such thread in a process. Two programs that send, of two
  # threads, could run in another order on another host and then wait for each
  # other. The thread only dispatches. It never waits for other hosts, so that
  # an error or the end of the process does not wait for it.

  def __init__(self, mesh: Mesh, queue: int = 0):
    """Compiles the program by which this thread's work is waited for."""
    # queue: 0, or that of another thread, which may only send over connections
    # that no other queue uses.
    self._queue = queue
    # This process has one CPU device of the mesh.
    own = Mesh(_own_devices(mesh)[:1], ("own",))
    # JAX refuses arrays of one device in a function that it compiles under
    # `jax.set_mesh` of several, but takes a function that is compiled already.
    with jax.set_mesh(own):
      self._start = jax.device_put(np.int32(0), own.devices[0])
      follow = jax.jit(lambda token: token + 1)
      self._follow = follow.lower(self._start).compile()

  def send(self, program: Callable[..., Any], *args: Any) -> Any:
    """Returns a program's results: arrays that may not be computed yet."""
    # A program runs after everything that the calling thread had dispatched
    # before, which may send too, and after what any `Sender` had dispatched.
    # What the calling thread dispatches later, and does not depend on its
    # results, may run beside it, and so must not send.
    # The token is computed after all that this thread has dispatched so far.
    token = self._follow(self._start)

    def dispatch() -> Any:
      self._follow(token)
      return program(*args)

    return _start_thread(self._queue).submit(dispatch).result()


@functools.cache
def _start_thread(queue: int) -> concurrent.futures.ThreadPoolExecutor:
  """Returns the one thread of a queue in this process."""
  name = f"jaxmotion-sender-{queue}"
  return concurrent.futures.ThreadPoolExecutor(1, name)


def choose_overlap(mesh: Mesh, axis_name: AxisName, overlap: str | None) -> str:
  """Returns how a step hides its exchange: "program" or "thread"."""
  own = _own_devices(mesh)
  workers = core.count_devices(axis_name, mesh.shape)
  refusal = None
  if len(own) > 1:
    refusal = f"a process with several devices, got 'thread' for {len(own)}"
  elif mesh.size > workers:
    refusal = (
      f"a model that is sharded over processes, got 'thread' for {mesh.size} "
      f"devices of {workers} workers"
    )
  if overlap == "thread" and refusal is not None:
    raise ValueError(f"`overlap` must be 'program' for {refusal}.")
  if overlap is not None:
    return overlap
  has_hosts = mesh.size > 1 and own[0].platform == "cpu"
  return "thread" if has_hosts and refusal is None else "program"


def _own_devices(mesh: Mesh) -> list[jax.Device]:
  """Returns the devices of a mesh that belong to this process."""
  process = jax.process_index()
  return [d for d in mesh.devices.flat if d.process_index == process]


def measure_swap_bytes(mesh: Mesh, sender: Sender) -> float:
  """Returns up to how many bytes two workers swap faster than they add."""
  # It is what the link carries in two round trips. A sum takes two of them, and
  # uses the link in both directions at once. A swap takes one, and sends first
  # in one direction and then in the other. A link that carries 256 KiB at most
  # has fast round trips, and no message is swapped.
  if mesh.size != 2 or jax.process_count() != 2:
    return 0.0
  axes = tuple(mesh.axis_names)
  rows = NamedSharding(mesh, jax.P(axes))

  @jax.jit
  @jax.shard_map(mesh=mesh, in_specs=jax.P(axes), out_specs=jax.P())
  def add(own: jax.Array) -> jax.Array:
    return lax.psum(own, axes)

  def add_up(values: np.ndarray) -> np.ndarray:
    own = jax.make_array_from_process_local_data(rows, values)
    total = jax.block_until_ready(sender.send(add, own))
    return np.asarray(total.addressable_data(0))

  def time_sum(nbytes: int) -> float:
    """Returns the least seconds that a sum takes, the mean of both hosts."""
    words, times = np.zeros(nbytes // 4, np.float32), []
    for _ in range(_WARM_UP + _REPEATS):
      begin = time.perf_counter()
      add_up(words)
      times.append(time.perf_counter() - begin)
    least = np.array([min(times[_WARM_UP:])], np.float32)
    # The mean of both processes: if they chose differently, they would wait for
    # each other.
    return float(add_up(least)[0]) / 2

  # One element is sent whole, in one round trip.
  round_trip, sent = time_sum(_SHORT), _MEDIUM
  sending = time_sum(sent) - 2 * round_trip
  if sending < _SLOW * round_trip:
    sent = _LONG
    sending = time_sum(sent) - 2 * round_trip
  swapped = 2 * round_trip * sent / max(sending, _LEAST)
  return swapped if swapped > _GATHERED else 0.0


class StepsInFlight:
  """Waits before a loop runs too many steps ahead of emulated devices."""

  # Programs beyond XLA:CPU's limit wait, and on several devices of one process
  # they wait in the threads that run the programs. Some devices may have no
  # thread left for the oldest program. Those that have started it then wait in
  # its collective until a timeout ends the process.

  def __init__(self, mesh: Mesh) -> None:
    # Nothing waits on accelerators, nor on a process with one CPU device.
    own = _own_devices(mesh)
    self._is_limited = sum(d.platform == "cpu" for d in own) > 1
    self._results: collections.deque[jax.Array] = collections.deque()

  def wait(self, args: PyTree) -> None:
    """Waits until one more step may be dispatched."""
    while len(self._results) >= _MAX_STEPS:
      result = self._results.popleft()
      # Where the caller has deleted the result, the arguments of the next step
      # are waited for instead.
      jax.block_until_ready(args if result.is_deleted() else result)

  def add(self, results: PyTree) -> None:
    """Remembers a step that was dispatched by a result that is not donated."""
    # The first array stands for all.
    for leaf in jax.tree.leaves(results)[:1]:
      if self._is_limited and not isinstance(leaf, jax.core.Tracer):
        self._results.append(leaf)


class _Program(NamedTuple):
  """Describes one jitted program of a step, and which thread dispatches it."""

  stage: _stages.Stage
  run: Callable[..., Any]
  queue: int | None  # Which sender dispatches it; None is this thread.
  drops: tuple[Any, ...]  # The arrays that no later program reads.


class _Plan(NamedTuple):
  """Lists the programs of a step, for arguments of certain shapes."""

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
    """Opens the queues; programs are made when the step is called."""
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
      types = mesh.axis_types
      self._meshes.append(Mesh(devices, mesh.axis_names, axis_types=types))
    self._senders = [Sender(mesh, q) for q in range(len(self._meshes))]
    self._plans: dict[Any, _Plan | None] = {}

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Runs the step's programs in turn, while queues send what they made."""
    # Without `own` senders, all has arrived when this function returns.
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
        results = self._dispatch(program, operands)
        arrays.update(zip(program.stage.makes, results, strict=True))
        if program.queue is not None:
          sent.append(results)
        for value in program.drops:
          del arrays[value]
    finally:
      # The caller may send as soon as this function ends, after an error too.
      if self._own is None:
        jax.block_until_ready(sent)
    outputs = [arrays[v] for v in plan.stages.outputs]
    returned = set(map(id, outputs))
    for leaf in jax.tree.leaves(args[: self._donated]):
      if isinstance(leaf, jax.Array) and id(leaf) not in returned:
        leaf.delete()  # No program could write to it.
    return jax.tree.unflatten(plan.treedef, outputs)

  def _dispatch(self, program: _Program, operands: list[Any]) -> Any:
    """Returns the results of a program, which its sender dispatches."""
    queue = program.queue
    if queue is None:
      return program.run(*operands)
    if not queue:
      return self._senders[0].send(program.run, *operands)
    operands = [_move(x, self._meshes[queue]) for x in operands]
    results = self._senders[queue].send(program.run, *operands)
    return [_move(x, self._mesh) for x in results]

  def _make_plan(
    self, args: tuple[Any, ...], kwargs: dict[str, Any]
  ) -> _Plan | None:
    """Returns the programs of a step for such arguments; None if it is one."""
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
    programs = self._jit_all(stages, _match_buffers(stages, count))
    return _Plan(stages, programs, treedef)

  @functools.cached_property
  def _in_pieces(self) -> _sending.Sending:
    """Pieces and swaps of a step, once the link is measured."""
    # Short messages over a slow round trip are swapped and not added.
    swap_bytes = measure_swap_bytes(self._mesh, self._senders[0])
    return _sending.Sending(_MOST_PIECES, swap_bytes)

  def _jit_all(
    self, stages: _stages.Stages, taken_by: dict[Any, Any]
  ) -> tuple[_Program, ...]:
    """Jits the stages, which donate what is not read again, in their queues."""
    last: dict[Any, int] = {}
    for index, stage in enumerate(stages.programs):
      last.update(dict.fromkeys(stage.reads, index))
    programs: list[_Program] = []
    queues = itertools.cycle(range(len(self._senders)))
    for index, stage in enumerate(stages.programs):
      ends = [
        v for v in stage.reads if last[v] == index and v not in stages.outputs
      ]
      turn = next(queues) if stage.sends else None
      # Only what has no order of the devices may use the second queue.
      queue = 0 if turn and not stage.is_symmetric else turn
      given = [
        position
        for position, v in enumerate(stage.reads)
        if v in ends and taken_by.get(v) in stage.makes
      ]
      on_mesh = functools.partial(stage.run, mesh=self._meshes[queue or 0])
      run = jax.jit(on_mesh, donate_argnums=given)
      programs.append(_Program(stage, run, queue, tuple(ends)))
    return tuple(programs)


def _match_buffers(stages: _stages.Stages, donated: int) -> dict[Any, Any]:
  """Matches each donated argument with the result that takes its buffer."""
  # Those of `jax.jit`: the next result of the same shape and dtype, in order.
  # So a parameter's buffer goes to the new value of that parameter.
  free: dict[Any, list[Any]] = {}
  for v in stages.outputs:
    free.setdefault((v.shape, v.dtype), []).append(v)
  taken_by = {}
  for v in stages.inputs[:donated]:
    if results := free.get((v.shape, v.dtype)):
      taken_by[v] = results.pop(0)
  return taken_by


def _move(x: jax.Array, mesh: Mesh) -> jax.Array:
  """Returns the same buffer as an array of a mesh in another order."""
  # A sum has no use for the order of its terms' rows.
  assert isinstance(x.sharding, NamedSharding)
  return jax.make_array_from_single_device_arrays(
    x.shape, NamedSharding(mesh, x.sharding.spec), [x.addressable_data(0)]
  )
