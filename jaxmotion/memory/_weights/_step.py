"""One training step of a host-resident model: encode, send, compute, return."""

import collections
import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion import core
from jaxmotion.codecs import Codec
from jaxmotion.core import Array, PyTree
from jaxmotion.memory._weights import _programs, _state

# From a cotangent of a stage's output to the gradients' payloads, the cotangent
# of the stage's input and the new state of the gradients' codec.
Backward = Callable[[PyTree], tuple[list[PyTree], PyTree, PyTree]]


def call_directly(name: str, op: Callable[..., Any], *args: Any) -> Any:
  """Calls an op of the step: the `run_op` hook that measures nothing."""
  del name
  return op(*args)


class Step:
  """A step in progress: the state in lists that change stage by stage.

  Order of calls: JAX returns from a call before its work is done, on the device
  and on the host. So the order of calls is the pipeline. Only `_move_arrays`
  waits, for the arrays that it moves. A stage's forward pass is therefore
  dispatched before the next stage's payload is waited for. All backward passes
  are dispatched before the first gradient is waited for.

  Exceptions: nothing that the old state holds is donated until all gradients
  are on the host, but the device's reference. That is the host's bit for bit:
  `run` puts the host's arrays in its place. What remains is `commit`, which
  depends on no function of the user but the optimizer. It is not interrupted.

  Memory: every reference that Python holds keeps a buffer on the device. The
  backward passes are popped off their list as they run, so that the weights and
  residuals of a stage are freed with them. No local name outlives its stage.
  `tests/memory/weights/test_step.py` counts the live arrays.

  Indices: `stage_index` and `packet_index` are explained in `_layout`.
  """

  def __init__(
    self,
    spec: _programs.ModelSpec,
    state: _state.HostState,
    run_op: Callable[..., Any] = call_directly,
  ) -> None:
    self.spec, self.layout = spec, spec.layout
    self.run_op, self.old_state = run_op, state
    self.params = jax.tree.leaves(state.params)
    self.treedef: Any = jax.tree.structure(state.params)
    self.opt_state = list(state.opt_state)
    self.reference = [list(packets) for packets in state.reference]
    placed = _state.place_reference(state, spec.device)
    self.device_reference: list[list[PyTree]] = [list(p) for p in placed]
    self.gradients: list[PyTree] = [None] * len(self.params)
    self.grad_state = list(state.grad_state)
    self.stats = list(state.stats)
    self.sent_bytes = self.returned_bytes = 0

  def run(self, batch: PyTree) -> Array:
    """Runs both passes, fetches the gradients, and returns the loss."""
    state, spec = self.old_state, self.spec
    if spec.send_difference:
      # From here on the state is whole without the arrays that are donated.
      state.device_reference = state.reference
    batch = jax.device_put(batch, spec.device)
    loss, passes = self._forward_stages(batch)
    for stage_index, payloads in self._backward_stages(passes, loss):
      model_indices = self.layout.stages[stage_index].model_indices
      for i, payload in zip(model_indices, payloads, strict=True):
        self.gradients[i] = payload
    for arguments in self._update_arguments():
      # Raises here what a trace raises, before anything is donated.
      _programs.update.eval_shape(*arguments)
    return loss

  def commit(self) -> _state.HostState:
    """Updates the parameters; the old state becomes the new one, returned."""
    # All updates are dispatched here, the first stage's first: the host
    # computes them while the device computes the next step's first stages. If
    # `run_op` fails, updates go on without it, and the exception is raised at
    # the end.
    failure: BaseException | None = None
    with _hold_signals():
      for position, arguments in enumerate(self._update_arguments()):
        update_once = _run_once(_programs.update)
        try:
          self.run_op("update", update_once, *arguments)
        except BaseException as error:
          failure = failure or error
        params, self.opt_state[position] = update_once(*arguments)
        leaves = jax.tree.leaves(params)
        for i, leaf in zip(self._updated_leaves(position), leaves, strict=True):
          self.params[i] = leaf
      new = self._new_state()
      # One call of C, which no signal handler can interrupt.
      vars(self.old_state).update(vars(new), is_taken=True)
    if failure is not None:
      raise failure
    return new

  def _new_state(self) -> _state.HostState:
    """Returns the state after the step, from the lists that it changed."""
    old = self.old_state
    return _state.HostState(
      step=np.asarray(int(old.step) + 1, np.int32),
      params=self.treedef.unflatten(self.params),
      opt_state=tuple(self.opt_state),
      reference=tuple(map(tuple, self.reference)),
      device_reference=tuple(map(tuple, self.device_reference)),
      grad_state=tuple(self.grad_state),
      stats=tuple(self.stats),
      sent_bytes=np.asarray(int(old.sent_bytes) + self.sent_bytes, np.int64),
      returned_bytes=np.asarray(
        int(old.returned_bytes) + self.returned_bytes, np.int64
      ),
    )

  def squared_errors(self) -> list[Array]:
    """Returns the squared error of each group's weights, if sent now."""
    totals: list[Any] = [np.float32(0)] * len(self.layout.groups.names)
    for stage_index, stage in enumerate(self.layout.stages):
      for packet_index, packet in enumerate(stage.packets):
        if packet.group is not None:
          codec, likes, reference = self._packet_codec(
            stage_index, packet_index, self.reference
          )
          totals[packet.group] += _programs.squared_error(
            codec,
            self.spec.device_dtype,
            likes,
            [self.params[i] for i in packet.model_indices],
            reference,
            self._key_coordinates(stage_index),
          )
    return totals

  def _forward_stages(self, batch: PyTree) -> tuple[Array, list[Backward]]:
    """Returns the loss, and the backward pass of every stage."""
    x: Any = None
    passes: list[Backward] = []
    functions = self.spec.functions
    for stage_index, function in enumerate(functions):
      y, backward = self._forward_stage(stage_index, function, x, batch)
      is_last = stage_index + 1 == len(functions)
      _check_output(self.spec.names[stage_index], y, is_last=is_last)
      passes.append(backward)
      if self.spec.stream_weights:
        # Dispatch does not wait: without this, all stages' weights would be
        # sent before the first stage is computed and its weights are freed.
        jax.block_until_ready(x)
      x = y
    return x, passes

  def _forward_stage(
    self,
    stage_index: int,
    function: _programs.StageFunction,
    x: PyTree,
    batch: PyTree,
  ) -> tuple[PyTree, Backward]:
    """Returns a stage's output and its backward pass."""
    # With `stream_weights`, the backward pass holds the payloads on the host
    # and decodes the weights again. It must not close over `inputs`, or the
    # decoded weights would stay on the device. Otherwise it holds the pullback.
    payloads = self._encode_stage(stage_index)
    other_inputs = (self.stats[stage_index], x, batch)
    inputs = (self._decode_stage(stage_index, payloads), *other_inputs)
    codecs = self._grad_codecs(self.layout.stages[stage_index].model_indices)
    first_argument: Callable[[], Any]
    if self.spec.stream_weights:
      y, self.stats[stage_index] = self.run_op(
        "forward", _programs.forward_only, function, *inputs
      )
      op = functools.partial(_programs.recompute_backward, function, codecs)
      first_argument = lambda: (
        self._decode_stage(stage_index, payloads),
        *other_inputs,
      )
    else:
      y, self.stats[stage_index], residuals = self.run_op(
        "forward", _programs.forward, function, *inputs
      )
      pullback = residuals.pullback(*inputs)
      op = functools.partial(_programs.backward, codecs)
      first_argument = lambda: pullback

    def backward(ct: PyTree) -> tuple[list[PyTree], PyTree, PyTree]:
      """Runs the stage's backward pass; see `_programs.backward`."""
      return self.run_op(
        "backward",
        op,
        first_argument(),
        ct,
        self.grad_state[stage_index],
        self._key_coordinates(stage_index),
      )

    return y, backward

  def _backward_stages(
    self, passes: list[Backward], loss: Array
  ) -> Iterator[tuple[int, list[PyTree]]]:
    """Yields (stage index, gradients on the host), the last stage first."""
    # Without `stream_weights` all backward passes are dispatched before the
    # first gradients are waited for. With it, gradients are taken one stage
    # behind: waiting for them keeps the weights of further stages off the
    # device.
    in_flight: collections.deque[Any] = collections.deque()
    max_in_flight = 1 if self.spec.stream_weights else len(passes)
    ct: PyTree = np.ones((), loss.dtype)
    for stage_index in reversed(range(len(passes))):
      # Popping the pass frees the stage's weights and residuals.
      payloads, ct, self.grad_state[stage_index] = passes.pop()(ct)
      for a in jax.tree.leaves(payloads):
        a.copy_to_host_async()
      in_flight.append((stage_index, payloads))
      if len(in_flight) > max_in_flight:
        yield self._return_gradients(*in_flight.popleft())
    while in_flight:
      yield self._return_gradients(*in_flight.popleft())

  def _return_gradients(
    self, stage_index: int, payloads: list[PyTree]
  ) -> tuple[int, list[PyTree]]:
    """Waits for the gradients of a stage, and moves them to the host."""
    payloads = self.run_op("return", _move_arrays, payloads, self.spec.host)
    self.returned_bytes += core.tree_bytes(payloads)
    return stage_index, payloads

  def _encode_stage(self, stage_index: int) -> list[PyTree]:
    """Returns a stage's payloads on the host, a list for each packet."""
    stage, encoded = self.layout.stages[stage_index], []
    for packet_index, packet in enumerate(stage.packets):
      codec, likes, reference = self._packet_codec(
        stage_index, packet_index, self.reference
      )
      payloads = self.run_op(
        "pack",
        _programs.encode,
        codec,
        self.spec.device_dtype,
        [self.params[i] for i in packet.model_indices],
        reference,
        self._key_coordinates(stage_index),
      )
      if reference is not None:
        self.reference[stage_index][packet_index] = self.run_op(
          "pack", _programs.decode, codec, likes, payloads, reference
        )
      encoded.append(payloads)
    return encoded

  def _decode_stage(self, stage_index: int, encoded: list[PyTree]) -> PyTree:
    """Sends a stage's payloads; returns its weights on the device."""
    encoded = self.run_op("send", _move_arrays, encoded, self.spec.device)
    self.sent_bytes += core.tree_bytes(encoded)
    stage = self.layout.stages[stage_index]
    weights: list[Any] = [None] * len(stage.model_indices)
    for packet_index, payloads in enumerate(encoded):
      codec, likes, reference = self._packet_codec(
        stage_index, packet_index, self.device_reference
      )
      leaves = self.run_op(
        "unpack", _programs.decode, codec, likes, payloads, reference, True
      )
      if reference is not None:
        self.device_reference[stage_index][packet_index] = leaves
        if self.spec.device_dtype != "float32":
          leaves = self.run_op(
            "unpack", _programs.cast_leaves, self.spec.device_dtype, leaves
          )
      stage_indices = stage.packets[packet_index].stage_indices
      for i, leaf in zip(stage_indices, leaves, strict=True):
        weights[i] = leaf
    return stage.treedef.unflatten(weights)

  def _packet_codec(
    self, stage_index: int, packet_index: int, references: list[list[PyTree]]
  ) -> tuple[Codec, tuple[jax.ShapeDtypeStruct, ...], PyTree]:
    """Returns a packet's codec, leaf shapes and reference (or None)."""
    packet = self.layout.stages[stage_index].packets[packet_index]
    reference = references[stage_index][packet_index] if references else None
    is_difference = reference is not None
    return *self.spec.packet_codec(packet, is_difference), reference

  def _updated_leaves(self, position: int) -> Sequence[int]:
    """Returns the positions of the leaves that one update is of."""
    if self.spec.is_per_stage:
      return self.layout.stages[position].model_indices
    return range(len(self.params))

  def _update_arguments(self) -> Iterator[tuple[Any, ...]]:
    """Yields the arguments of each update, one for all or one a stage."""
    for position, opt_state in enumerate(self.opt_state):
      model_indices = self._updated_leaves(position)
      treedef = self.treedef
      if self.spec.is_per_stage:
        treedef = self.layout.stages[position].treedef
      yield (
        self.spec.tx,
        self._grad_codecs(model_indices),
        self.spec.device_dtype,
        treedef.unflatten([self.params[i] for i in model_indices]),
        opt_state,
        [self.gradients[i] for i in model_indices],
      )

  def _grad_codecs(self, model_indices: Iterable[int]) -> tuple[Codec, ...]:
    """Returns the codec of each leaf's gradient."""
    return tuple(self.spec.grad_codecs[i] for i in model_indices)

  def _key_coordinates(self, stage_index: int) -> np.ndarray:
    """Returns where this stage's random bits are: (seed, step, stage)."""
    return np.array(
      [self.spec.seed, self.old_state.step, stage_index], np.uint32
    )


def _run_once(op: Callable[..., Any]) -> Callable[..., Any]:
  """Returns an op that runs in its first call, and then returns its result."""
  results: list[Any] = []

  def run(*args: Any) -> Any:
    if not results:
      results.append(op(*args))
    return results[0]

  return run


def _move_arrays(tree: PyTree, device: jax.Device) -> PyTree:
  """Returns the arrays on a device of another backend."""
  # Arrays pass through NumPy. An array on the host is passed without a copy,
  # and an array on the device is read where `copy_to_host_async` has put it.
  return jax.device_put(jax.tree.map(np.asarray, tree), device)


def _check_output(name: str, x: PyTree, *, is_last: bool) -> None:
  """Raises unless a stage returns floats, and the last one a scalar."""
  for a in jax.tree.leaves(x):
    core.float_array(f"output of stage {name}", a)
  if is_last and not (isinstance(x, jax.Array) and jnp.shape(x) == ()):
    shapes = jax.tree.map(core.shape_string, x)
    raise ValueError(
      f"`stages` must end in a scalar loss, got {shapes} from {name!r}."
    )


@contextlib.contextmanager
def _hold_signals() -> Iterator[None]:
  """Postpones signals that Python handles to the end of the block."""
  # A handler such as that of Ctrl-C raises between any two operations. It may
  # do so after a program has taken its donated arguments and before its results
  # have a name. In other threads than the main one no handler runs, so nothing
  # is postponed.
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  held: list[int] = []
  try:
    # Puts back every handler, even if one that is back already raises.
    with contextlib.ExitStack() as stack:
      # Ctrl-C has a low number, so that its handler is among the last ones.
      for number in sorted(signal.valid_signals()):
        handler = signal.getsignal(number)
        if callable(handler):
          stack.callback(signal.signal, number, handler)
          signal.signal(number, lambda number, frame: held.append(number))
      yield
  finally:
    with contextlib.ExitStack() as stack:
      for number_held in reversed(held):
        stack.callback(signal.raise_signal, number_held)
