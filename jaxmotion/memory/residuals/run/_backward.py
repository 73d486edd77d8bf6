"""Backward pass that decodes residuals when a step first needs them.

The pass runs the backward steps of the joint program in order. Before a step
that reads forward values, it decodes the residuals that these follow from and
recomputes the cheap values in between. Everything it brings back is tied by a
barrier to a *token*: a value of the backward pass that the step reads anyway.
The barriers hold XLA to that order:

* Without the tie from token to buffers, XLA would decode residuals right after
  the forward pass encoded them, or keep what is computed twice.
* Gradients of weights are tied to the next token as well. Nothing waits for
  such a gradient, so XLA would put it off, and keep what it is computed from
  until the end of the pass. Tying them brought ResNet-50 with 4-bit residuals
  from 669 to 524 MiB (compiled for an H100, not run).
* Gradients that wait long for a reader are tied, too (`_order.find_waiting`).
"""

import collections
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxmotion import program
from jaxmotion.core import Array
from jaxmotion.memory import _memory_kind
from jaxmotion.memory.residuals import choose, trace
from jaxmotion.memory.residuals.run import _barriers, _forward, _order
from jaxmotion.program import Operand, Step, Value


def backward(
  selection: choose.Selection,
  inputs: Sequence[Array | None],
  buffers: Sequence[choose.Buffers],
  cotangents: Sequence[Array],
  *,
  gates: Sequence[Array] = (),
  transfer: bool = True,
) -> list[Any]:
  """Computes the gradients from the saved residuals."""
  joint = selection.joint
  env = dict(joint.program.constants)
  pairs = zip(joint.inputs, inputs, strict=True)
  env.update((v, x) for v, x in pairs if v in selection.always_live)
  env.update(zip(joint.cotangents, cotangents, strict=True))
  if selection.plain is None:
    return _BackwardPass(selection, env, buffers, transfer, gates).run()
  plain_buffers = zip(selection.plain, buffers, strict=True)
  env.update((value, buffer) for value, (buffer,) in plain_buffers)
  program.evaluate(joint.backward_steps(), env)
  return _read_gradients(joint, env)


def _read_gradients(joint: trace.JointProgram, env: _forward.Env) -> list[Any]:
  """Returns the gradient of each input, None for inputs without one."""
  return [
    None if g is None else program.read_operand(env, g) for g in joint.gradients
  ]


class _BackwardPass:
  """State of one backward pass."""

  def __init__(
    self,
    selection: choose.Selection,
    env: _forward.Env,
    buffers: Sequence[choose.Buffers],
    transfer: bool,
    gates: Sequence[Array],
  ):
    self._selection, self._joint = selection, selection.joint
    # Arrays of known values. Of forward values these are constants, always-live
    # inputs, what steps have read, and little else: what is cheap is recomputed
    # when it is read again.
    self._env = env
    # Of saved values, and of cached ones once they were recomputed.
    self._residual = dict(selection.saved)
    self._buffers = dict(zip(selection.saved, buffers, strict=True))
    # Values whose buffers are on the host and not fetched yet, and those of
    # them that have not been asked for, in the order in which steps need them.
    self._on_host = {
      v for v, r in selection.saved.items() if r.on_host and transfer
    }
    self._fetch_queue: collections.deque[Value] = collections.deque()
    self._is_in_loop = any(r.repeats > 1 for r in selection.saved.values())
    self._is_ordered = False  # Whether there was a barrier.
    # Since the last barrier: results of expensive steps and cheap ones that
    # wait for a reader, and results of all backward steps.
    self._untied: list[Value] = []
    self._made: set[Value] = set()
    # Arrays that the first barrier waits for, until there was one.
    self._gates = list(gates)
    # Positions of the steps that make the values of the pass.
    self._position: dict[Value, int] = {}
    self._later: Sequence[Step] = ()  # Steps that have not run yet.
    self._waits = _barriers.WaitChoice(selection, self._residual, self._on_host)

  def run(self) -> list[Any]:
    """Runs the backward steps and returns the gradients."""
    joint = self._joint
    steps = _order.order_backward(joint, {*self._env, *self._buffers})
    self._position = {v: i for i, s in enumerate(steps) for v in s.outs}
    self._fetch_queue = self._order_fetches(steps)
    wanted: list[Value] = []
    whole: list[Value] = []
    waiting = _order.find_waiting(steps)
    ends_fusion = [trace.is_product(step) for step in steps]
    for i, step in enumerate(steps):
      self._later = steps[i:]
      if i == 0 or ends_fusion[i - 1] or ends_fusion[i]:
        reads, whole = _order.list_fused_reads(steps, i)
        wanted = [v for v in reads if v not in joint.backward]
      if any(v not in self._env for v in step.reads):
        self._provide(wanted, self._find_token(step), whole)
      program.evaluate([step], self._env)
      self._made.update(step.outs)
      if program.is_expensive(step.eqn) and step.name != "optimization_barrier":
        self._untied += step.outs
      else:
        self._untied += [v for v in step.outs if v in waiting]
    self._provide([g for g in joint.gradients if g is not None], None)
    gradients = _read_gradients(joint, self._env)
    # XLA takes more memory for a loop of which nothing reads a result.
    is_tied = self._is_ordered or any(step.name == "scan" for step in steps)
    return _forward.tie_arrays(gradients) if is_tied else gradients

  def _find_token(self, step: Step) -> Value:
    """Finds an array of the backward pass that a step waits for."""
    # A barrier writes the arrays that it ties to memory, so the token is an
    # array that is written anyway: an operand of a step that ends a fusion,
    # else the last result of an expensive step that the operand follows from.
    # Tied to the operand, the barrier made XLA write the broadcast of
    # per-channel sums, or the gradient of an attention's probabilities in
    # float32.
    # In front of a product, an operand no larger than what it is computed from
    # is written as it is.
    backward, maker = self._joint.backward, self._joint.order.maker
    todo = [next(v for v in step.reads if v in backward)]
    seen = {*todo}
    written: list[Value] = []
    while todo:
      value = todo.pop()
      made_by = maker(value)
      reads = [v for v in made_by.reads if v in backward] if made_by else []
      if (
        made_by is None
        or program.is_expensive(made_by.eqn)
        or (
          trace.is_product(step)
          and value.nbytes <= max(v.nbytes for v in reads)
        )
      ):
        written.append(value)
        continue
      todo += dict.fromkeys(v for v in reads if v not in seen)
      seen.update(reads)
    return max(written, key=lambda v: self._position.get(v, -1))

  def _order_fetches(self, steps: Sequence[Step]) -> collections.deque[Value]:
    """Returns the values on the host, in the order in which steps need them."""
    if not self._on_host:
      return collections.deque()
    needed: dict[Value, None] = {}
    for step in steps:
      reads = [v for v in step.reads if v not in self._env]
      for earlier in self._joint.order.leading_to(reads, self._buffers):
        needed.update(dict.fromkeys(earlier.reads))
      needed.update(dict.fromkeys(reads))
    return collections.deque(v for v in needed if v in self._on_host)

  def _provide(
    self,
    values: Iterable[Operand],
    token: Value | None,
    whole: Collection[Value] = (),
  ) -> None:
    """Puts forward values into `_env`, none available before the token."""
    # Values between the residuals and those asked for are not kept: until their
    # next use they would take the memory that the residuals were to save. They
    # are recomputed when they are read again. Decoded residuals that may have
    # overflowed are kept, since decoding them may recompute something
    # expensive.
    env = self._env
    missing = [v for v in values if isinstance(v, Value) and v not in env]
    if not missing:
      return
    steps = self._steps_to(missing)
    if to_cache := self._find_values_to_cache(steps):
      joint = self._joint
      whole_part = _barriers.find_whole_part(
        joint,
        self._later,
        self._steps_to(to_cache),
        to_cache,
        {*env, *self._buffers},
        {*self._selection.always_live, *joint.program.constants},
      )
      if whole_part:  # A cache is of no use there.
        whole = missing = list(dict.fromkeys([*missing, *whole_part]))
      else:
        self._recompute_and_cache(to_cache, token)
      steps = self._steps_to(missing)
    decoded, local = self._decode_operands(missing, steps, token, whole)
    program.evaluate(steps, local)
    unsure = [v for v in decoded if self._residual[v].may_overflow]
    env.update((v, local[v]) for v in {*missing, *unsure})

  def _steps_to(self, values: Iterable[Value]) -> list[Step]:
    """Returns the steps to values from what is known or has buffers."""
    known = collections.ChainMap(self._env, self._buffers)
    return self._joint.order.leading_to(values, known)

  def _find_values_to_cache(self, steps: Sequence[Step]) -> list[Value]:
    """Returns the values to cache when these steps are rerun."""
    # These are the results that the selection wants cached. If there are any,
    # all other values to be cached that follow from the results by cheap steps
    # are added. They are not needed yet, but until they are, what they follow
    # from would have to be kept for them.
    made = {v: None for s in steps for v in s.outs}
    cached = self._selection.cached
    to_cache = [v for v in made if v in cached]
    if to_cache:
      known = {**made, **self._env, **self._buffers}
      order = self._joint.order
      to_cache += [v for v in cached if order.follows_cheaply(v, known)]
    return to_cache

  def _recompute_and_cache(
    self, values: Sequence[Value], token: Value | None
  ) -> None:
    """Recomputes values and saves them, as the forward pass saves residuals."""
    # From here on these values have buffers like any residual. Results of
    # expensive steps on the way that are not cached stay in `_env`: other
    # values to be cached may follow from them.
    steps = self._steps_to(values)
    _, local = self._decode_operands(values, steps, token, ())

    def encode(due: _forward.Saved, after: Value | None) -> None:
      """Encodes values; whatever reads `after` waits for their buffers."""
      buffers = {v: r.coder.encode(local[v]) for v, r in due}
      tied = list(buffers.values())
      if after is not None:
        tied, local[after] = _forward.tie_arrays((tied, local[after]))
      self._buffers.update(zip(buffers, tied, strict=True))

    cached = {v: self._selection.cached[v] for v in values}
    last = _forward.evaluate_and_encode(steps, local, cached.items(), encode)
    encode(last, None)
    self._residual.update(cached)
    expensive = [
      v for s in steps if program.is_expensive(s.eqn) for v in s.outs
    ]
    self._env.update((v, local[v]) for v in expensive if v not in self._buffers)

  def _decode_operands(
    self,
    wanted: Sequence[Value],
    steps: Sequence[Step],
    token: Value | None,
    whole: Collection[Value],
  ) -> tuple[list[Value], _forward.Env]:
    """Decodes the residuals that steps read, none before the token exists."""
    # One barrier ties the token to: the buffers of these residuals; those of
    # the next residual on the host, so that its transfer starts now; the
    # always-live inputs that the steps read, so that XLA does not merge the
    # recomputation with the forward pass; and the results of expensive steps
    # since the last barrier, so that gradients of weights are finished.
    # Returns the decoded values, and a copy of `_env` with them, for the steps.
    env = self._env
    rerun = dict.fromkeys(v for s in steps for v in s.reads)
    touched = {**rerun, **dict.fromkeys(wanted)}
    to_decode = [v for v in touched if v in self._buffers and v not in env]
    live = [v for v in touched if v in self._selection.always_live and v in env]
    masked: set[Value] = set()
    finished: list[Value] = []
    if token is not None:
      masked = self._waits.list_masked(to_decode, steps, whole, self._buffers)
      finished = self._list_finished(token)
    direct = {v for v in to_decode if v not in rerun and self._waits.is_free(v)}
    to_fetch = [v for v in to_decode if v not in masked]
    to_fetch += self._take_prefetch(to_decode)
    mask = jnp.zeros((), jnp.uint8)
    if not (to_fetch or live or finished or self._waits.reruns_forward(steps)):
      masked = set()  # A compiler has nothing to merge with the forward pass.
    tied = (
      [self._buffers[v] for v in to_fetch],
      [env[v] for v in live],
      [env[v] for v in finished],
      [mask] if masked else [],
      self._gates,
    )
    needs_order = live or masked or any(v not in direct for v in to_fetch)
    if token is not None and needs_order:
      self._is_ordered = True
      # Steps wait by reading the residuals. What the barrier returns for the
      # finished values and for the result of an expensive step is not read: a
      # compiler writes a fusion's result over an operand only if no barrier is
      # in between. The result of a fusion is read behind the barrier, or else
      # it is both written and computed again by each matmul.
      tied, after = _forward.tie_arrays((tied, env[token]))
      maker = self._joint.order.maker(token)
      if not (
        self._is_in_loop if maker is None else program.is_expensive(maker.eqn)
      ):
        env[token] = after
      self._untied, self._gates = [], []
      self._made.clear()
    self._buffers.update(zip(to_fetch, tied[0], strict=True))
    for value in to_fetch:
      if value in self._on_host:
        self._on_host.remove(value)
        self._buffers[value] = _memory_kind.to_device(self._buffers[value])
    local = {**env, **dict(zip(live, tied[1], strict=True))}
    for value in to_decode:
      if value in masked:
        # Words combined with a zero are read after that exists.
        words = [w | tied[3][0].astype(w.dtype) for w in self._buffers[value]]
        local[value] = self._residual[value].coder.decode(words)
      else:
        local[value] = self._decode(value)
    return to_decode, local

  def _list_finished(self, token: Value) -> list[Value]:
    """Returns the untied results that the token does not follow from."""
    # The others are there before the token is, and tied they would live on.
    before = {token}
    todo = [token]
    while todo:
      maker = self._joint.order.maker(todo.pop())
      reads = [] if maker is None else maker.reads
      new = [v for v in reads if v in self._made and v not in before]
      before.update(new)
      todo += new
    return [v for v in self._untied if v not in before]

  def _take_prefetch(self, to_decode: Sequence[Value]) -> list[Value]:
    """Takes the next value to fetch from the queue, if a fetch is due now."""
    # Its transfer then runs while the values that are needed now are used.
    for value in to_decode:
      if value in self._fetch_queue:
        self._fetch_queue.remove(value)
    is_due = any(v in self._on_host for v in to_decode)
    return [self._fetch_queue.popleft()] if is_due and self._fetch_queue else []

  def _decode(self, value: Value) -> Array:
    """Decodes a residual; if it has overflowed, recomputes it."""
    residual, buffers = self._residual[value], self._buffers[value]
    if not residual.may_overflow:
      return residual.coder.decode(buffers)
    return lax.cond(
      residual.coder.overflow_count(buffers) > 0,
      lambda: self._recompute_exactly(value),
      lambda: residual.coder.decode(buffers),
    )

  def _recompute_exactly(self, value: Value) -> Array:
    """Recomputes an overflowed residual from exact residuals alone."""
    # It runs as a branch of a conditional, so it changes no state: what it
    # decodes or fetches is for this branch.
    known = {
      v: x for v, x in self._env.items() if v not in self._joint.backward
    }
    exact = {v: r for v, r in self._residual.items() if r.is_exact}
    steps = self._joint.order.leading_to(
      [value], collections.ChainMap(known, exact)
    )
    # Not a set: the order of the branch's operands must not differ from run to
    # run, or the compilation cache would miss.
    for source in dict.fromkeys(v for s in steps for v in s.reads):
      if source in exact and source not in known:
        buffers = self._buffers[source]
        if source in self._on_host:
          buffers = _memory_kind.to_device(buffers)
        known[source] = exact[source].coder.decode(buffers)
    program.evaluate(steps, known)
    return known[value]
