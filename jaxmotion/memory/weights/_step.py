"""One training step: what goes, is computed and comes back, in which order."""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion.codecs import Codec
from jaxmotion.core import Array, PyTree, check_float, shape_string, tree_bytes
from jaxmotion.memory.weights import _programs as programs
from jaxmotion.memory.weights._layout import Layout
from jaxmotion.memory.weights._state import HostState

# From x's cotangent to the gradients' payloads, the cotangent of the x before
# and the state of the gradients' codec.
Backward = Callable[[PyTree], tuple[list[PyTree], PyTree, PyTree]]


def plain(name: str, piece: Callable[..., Any], *args: Any) -> Any:
  """Calls a piece of the step."""
  del name
  return piece(*args)


class Step:
  """A step under way: a state in lists, which change stage by stage.

  Calls return before their work is done, on the device as on the host, so the
  order of calls is the pipeline; only `_move` waits, for what it moves. A
  stage's forward pass is therefore dispatched before the next stage's payload
  is waited for, and all backward passes before the first gradient is.
  """

  def __init__(
    self,
    model: Any,
    layout: Layout,
    state: HostState,
    levels: tuple[int, ...],
    run_op: Callable[..., Any] = plain,
  ) -> None:
    self.model, self.layout, self.levels = model, layout, levels
    self.run_op, self.before = run_op, state
    self.names = model.names or ("loss",)
    self.leaf_codecs = layout.leaf_codecs(model.grads)
    self.params = jax.tree.leaves(state.params)
    self.treedef: Any = jax.tree.structure(state.params)
    self.opt_state = list(state.opt_state)
    self.reference = [list(h) for h in state.reference]
    self.device_reference = [list(h) for h in state.device_reference]
    self.grad_state = list(state.grad_state)
    self.stats = list(state.stats)
    self.sent_bytes = self.returned_bytes = 0

  def run(self, batch: PyTree) -> Array:
    """Trains on a batch; returns the loss."""
    batch = jax.device_put(batch, self.model.target)
    loss, passes = self._forward_all(batch)
    per_stage = self.model.update == "per_stage"
    grads: list[PyTree] = [None] * len(self.params)
    for k, payloads in self._backward_all(passes, loss):
      stage = self.layout.stages[k]
      if per_stage:
        self.opt_state[k] = self._update(
          stage.leaves, stage.treedef, self.opt_state[k], payloads
        )
      else:
        for i, payload in zip(stage.leaves, payloads, strict=True):
          grads[i] = payload
    if not per_stage:
      everything = range(len(grads))
      self.opt_state[0] = self._update(
        everything, self.treedef, self.opt_state[0], grads
      )
    return loss

  def state(self) -> HostState:
    """Returns the state after `run`."""
    before = self.before
    return HostState(
      step=np.int32(before.step + 1),
      params=self.treedef.unflatten(self.params),
      opt_state=tuple(self.opt_state),
      reference=tuple(map(tuple, self.reference)),
      device_reference=tuple(map(tuple, self.device_reference)),
      grad_state=tuple(self.grad_state),
      stats=tuple(self.stats),
      sent_bytes=np.int64(before.sent_bytes + self.sent_bytes),
      returned_bytes=np.int64(before.returned_bytes + self.returned_bytes),
    )

  def squared_errors(self) -> list[Array]:
    """Returns each group's squared error if it were sent now."""
    totals: list[Any] = [np.float32(0)] * len(self.layout.groups.names)
    for k, stage in enumerate(self.layout.stages):
      for j, packet in enumerate(stage.packets):
        if packet.group is not None:
          codec, likes, held = self._packet(k, j, self.reference)
          totals[packet.group] += programs.squared_error(
            codec, likes, self._leaves(k, j), held, self._where(k)
          )
    return totals

  def _forward_all(self, batch: PyTree) -> tuple[Array, list[Backward]]:
    x: Any = None
    passes: list[Backward] = []
    bodies = self.model.bodies
    for k, body in enumerate(bodies):
      y, backward = self._forward(k, body, x, batch)
      _check_output(self.names[k], y, last=k + 1 == len(bodies))
      passes.append(backward)
      if self.model.stream_weights:
        # Or all stages would be sent before the first is computed.
        jax.block_until_ready(x)
      x = y
    return x, passes

  def _forward(
    self, k: int, body: programs.Body, x: PyTree, batch: PyTree
  ) -> tuple[PyTree, Backward]:
    payloads = self._pack(k)
    rest = (self.stats[k], x, batch)
    given = (self._unpack(k, payloads), *rest)
    codecs = self._codecs(self.layout.stages[k].leaves)
    pull: Callable[..., Any]
    if self.model.stream_weights:
      y, self.stats[k] = self.run_op(
        "forward", programs.forward_only, body, *given
      )
      piece = functools.partial(programs.recompute_backward, body, codecs)
      pull = lambda: (self._unpack(k, payloads), *rest)
    else:
      y, self.stats[k], saved = self.run_op(
        "forward", programs.forward, body, *given
      )
      pullback = saved.pullback(*given)
      piece = functools.partial(programs.backward, codecs)
      pull = lambda: pullback

    def backward(ct: PyTree) -> tuple[list[PyTree], PyTree, PyTree]:
      state, where = self.grad_state[k], self._where(k)
      return self.run_op("backward", piece, pull(), ct, state, where)

    return y, backward

  def _backward_all(
    self, passes: list[Backward], loss: Array
  ) -> Iterator[tuple[int, list[PyTree]]]:
    """Yields stages, the last first, and their gradients on the host."""
    waiting: collections.deque = collections.deque()
    behind = 1 if self.model.stream_weights else len(passes)
    ct: PyTree = np.ones((), loss.dtype)
    for k in reversed(range(len(passes))):
      # Taken off the list: with it go the stage's weights and residuals.
      payloads, ct, self.grad_state[k] = passes.pop()(ct)
      for a in jax.tree.leaves(payloads):
        a.copy_to_host_async()
      waiting.append((k, payloads))
      if len(waiting) > behind:
        yield self._bring(waiting.popleft())
    while waiting:
      yield self._bring(waiting.popleft())

  def _bring(self, stage: tuple[int, list[PyTree]]) -> tuple[int, list[PyTree]]:
    k, payloads = stage
    payloads = self.run_op("return", _move, payloads, self.model.host)
    self.returned_bytes += tree_bytes(payloads)
    return k, payloads

  def _pack(self, k: int) -> list[PyTree]:
    """Returns a stage's payloads on the host, in a list for each packet."""
    packed = []
    for j in range(len(self.layout.stages[k].packets)):
      codec, likes, held = self._packet(k, j, self.reference)
      leaves, where = self._leaves(k, j), self._where(k)
      payloads = self.run_op(
        "pack", programs.encode, codec, leaves, held, where
      )
      if held is not None:
        self.reference[k][j] = self.run_op(
          "pack", programs.decode, codec, likes, payloads, held
        )
      packed.append(payloads)
    return packed

  def _unpack(self, k: int, packed: list[PyTree]) -> PyTree:
    """Sends a stage's payloads; returns its weights on the device."""
    packed = self.run_op("send", _move, packed, self.model.target)
    self.sent_bytes += tree_bytes(packed)
    stage = self.layout.stages[k]
    weights: list[Any] = [None] * len(stage.leaves)
    for j, payloads in enumerate(packed):
      codec, likes, held = self._packet(k, j, self.device_reference)
      leaves = self.run_op(
        "unpack", programs.decode, codec, likes, payloads, held
      )
      if held is not None:
        self.device_reference[k][j] = leaves
      for i, leaf in zip(stage.packets[j].leaves, leaves, strict=True):
        weights[i] = leaf
    return stage.treedef.unflatten(weights)

  def _packet(
    self, k: int, j: int, held: list[list[PyTree]]
  ) -> tuple[Codec, tuple[jax.ShapeDtypeStruct, ...], PyTree]:
    """Returns a packet's codec, its shapes and what is held of it."""
    stage = self.layout.stages[k]
    codec, likes = stage.packed(
      stage.packets[j], self.model.ladder, self.levels
    )
    return codec, likes, held[k][j] if held else None

  def _leaves(self, k: int, j: int) -> list[Array]:
    stage = self.layout.stages[k]
    return [self.params[stage.leaves[i]] for i in stage.packets[j].leaves]

  def _update(
    self,
    own: Sequence[int],
    treedef: Any,
    opt_state: PyTree,
    payloads: list[PyTree],
  ) -> PyTree:
    """Updates these parameters in place; returns the optimiser's state."""
    params = treedef.unflatten([self.params[i] for i in own])
    params, opt_state = self.run_op(
      "update",
      programs.update,
      self.model.tx,
      self._codecs(own),
      params,
      opt_state,
      payloads,
    )
    for i, leaf in zip(own, jax.tree.leaves(params), strict=True):
      self.params[i] = leaf
    return opt_state

  def _codecs(self, own: Iterable[int]) -> tuple[Codec, ...]:
    return tuple(self.leaf_codecs[i] for i in own)

  def _where(self, k: int) -> np.ndarray:
    return np.array([self.model.seed, self.before.step, k], np.uint32)


def _move(tree: PyTree, device: jax.Device) -> PyTree:
  """Returns the arrays on a device of another backend.

  By way of NumPy: what is on the host is handed over as it lies there, and
  what is on the device is read where `copy_to_host_async` has put it.
  """
  return jax.device_put(jax.tree.map(np.asarray, tree), device)


def _check_output(name: str, x: PyTree, *, last: bool) -> None:
  """Raises unless a stage's output is one.

  Raises:
    TypeError: not floating-point.
    ValueError: of the last stage, not a scalar.
  """
  for a in jax.tree.leaves(x):
    check_float(f"output of stage {name}", a)
  if last and not (isinstance(x, jax.Array) and jnp.shape(x) == ()):
    found = jax.tree.map(shape_string, x)
    raise ValueError(
      f"`stages` must end in a scalar loss, got {found} from {name!r}."
    )
