"""The backward pass of a function whose residuals are kept as a split says."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

from jax import lax

from jaxmotion.core import Array
from jaxmotion.memory._memory_kind import to_device
from jaxmotion.memory.residuals.choose import SavedResidual, Selection
from jaxmotion.memory.residuals.run._forward import (
  Env,
  Words,
  environment,
  evaluate_keeping,
  tied,
  together,
)
from jaxmotion.program import (
  Operand,
  Step,
  Value,
  evaluate,
  is_expensive,
  read_operand,
)


def backward(
  split: Selection,
  inputs: Sequence[Array | None],
  words: Sequence[Words],
  cotangents: Sequence[Array],
  *,
  transfer: bool = True,
) -> list[Any]:
  """Returns the gradients.

  Args:
    split: what the passes are those of.
    inputs: of the function; those that are not there anyway are not read.
    words: what `forward` kept.
    cotangents: of the outputs that have some.
    transfer: whether words on the host are still there; else all are here.
  """
  return _Backward(split, inputs, words, cotangents, transfer).run()


class _Backward:
  """A backward pass that makes residuals known when they are needed."""

  def __init__(
    self,
    split: Selection,
    inputs: Sequence[Array | None],
    words: Sequence[Words],
    cotangents: Sequence[Array],
    transfer: bool,
  ):
    self._split, self._joint = split, split.joint
    pairs = zip(split.joint.inputs, inputs, strict=True)
    self._env = environment(split, (p for p in pairs if p[0] in split.free))
    self._env.update(zip(split.joint.cotangents, cotangents, strict=True))
    self._residual = {k.value: k.residual for k in split.kept}
    values = [k.value for k in split.kept]
    self._words = dict(zip(values, words, strict=True))
    # On the host, until they are fetched.
    self._far = {k.value for k in split.kept if k.residual.on_host and transfer}
    # What has been computed since the last barrier, and was not cheap.
    self._loose: list[Value] = []

  def run(self) -> list[Any]:
    gradients = self._joint.gradients
    uses = self._joint.backward_steps()
    coming = self._arrivals(uses)
    for step in uses:
      token, again = self._token(step)
      if self._bring(step.reads, token, coming):
        for v in (v for s in again for v in s.outs):
          del self._env[v]
        evaluate(again, self._env)
      evaluate([step], self._env)
      if is_expensive(step.eqn) and step.name != "optimization_barrier":
        self._loose += step.outs
    self._bring([g for g in gradients if g is not None], None, coming)
    return tied(
      [None if g is None else read_operand(self._env, g) for g in gradients]
    )

  def _token(self, step: Step) -> tuple[Value, list[Step]]:
    """What a step waits for, and what then makes its operand of it.

    What a barrier waits for is an array in memory. Where an operand is made of
    one smaller array of the backward pass alone, by a broadcast say, it is that
    one.
    """
    backward = self._joint.backward
    token = next(v for v in step.reads if v in backward)
    again: list[Step] = []
    while (maker := self._joint.order.maker(token)) is not None:
      reads = list(maker.reads)
      if len(reads) != 1 or reads[0] not in backward or is_expensive(maker.eqn):
        break
      if reads[0].aval.size >= token.aval.size:
        break
      again.insert(0, maker)
      token = reads[0]
    return token, again

  def _arrivals(self, uses: Sequence[Step]) -> collections.deque[Value]:
    """What is on the host, in the order in which it is needed."""
    order = self._joint.order
    found: dict[Value, None] = {}
    for step in uses:
      reads = [v for v in step.reads if v not in self._env]
      for earlier in order.leading_to(reads, self._words):
        found.update((v, None) for v in earlier.reads)
      found.update((v, None) for v in reads)
    return collections.deque(v for v in found if v in self._far)

  def _bring(
    self,
    values: Iterable[Operand],
    token: Value | None,
    coming: collections.deque[Value],
  ) -> bool:
    """Makes values of the function known, not before the token is.

    Without this order XLA would decode what was encoded on the spot, or keep
    what is computed twice.

    Returns:
      Whether there were any.
    """
    env = self._env
    missing = [v for v in values if isinstance(v, Value) and v not in env]
    if not missing:
      return False
    steps = self._leading_to(missing)
    if held := self._to_hold(steps):
      self._redo(held, token, coming)
      steps = self._leading_to(missing)
    packed, local = self._ready(missing, steps, token, coming)
    evaluate(steps, local)
    # The rest is made again when it is read: until then it would take what
    # its residuals were to save.
    stays = {*missing, *(v for v in packed if self._residual[v].may_overflow)}
    env.update((v, local[v]) for v in stays)
    return True

  def _leading_to(self, values: Iterable[Value]) -> list[Step]:
    known = collections.ChainMap(self._env, self._words)
    return self._joint.order.leading_to(values, known)

  def _to_hold(self, steps: Sequence[Step]) -> list[Value]:
    """What to hold of that which steps do again, and what is cheap from there.

    The latter is not needed yet, but what it is made of would be held for it.
    """
    made = {v: None for s in steps for v in s.outs}
    held = [v for v in made if v in self._split.held]
    if held:
      known = collections.ChainMap(made, self._env, self._words)
      for value in self._split.held:
        more = self._joint.order.leading_to([value], known)
        if more and not any(is_expensive(s.eqn) for s in more):
          held.append(value)
    return held

  def _redo(
    self,
    held: Sequence[Value],
    token: Value | None,
    coming: collections.deque[Value],
  ) -> None:
    """Computes values again and keeps them, as `forward` does residuals."""
    steps = self._leading_to(held)
    _, local = self._ready(held, steps, token, coming)
    residual = self._split.held

    def encode(due: Sequence[SavedResidual], after: Value | None) -> None:
      words = {v: r.encode(local[v])[0] for v, r in due}
      bound = list(words.values())
      if after is not None:
        bound, local[after] = together(bound, local[after])
      self._words.update(zip(words, bound, strict=True))

    kept = [SavedResidual(v, residual[v]) for v in held]
    encode(evaluate_keeping(steps, local, kept, encode), None)
    self._residual.update(kept)
    # Others that are held may be made of it.
    dear = [v for s in steps if is_expensive(s.eqn) for v in s.outs]
    self._env.update((v, local[v]) for v in dear if v not in self._words)

  def _ready(
    self,
    wanted: Sequence[Value],
    steps: Sequence[Step],
    token: Value | None,
    coming: collections.deque[Value],
  ) -> tuple[list[Value], Env]:
    """Decodes what steps to wanted values read, not before the token is there.

    Returns:
      What was decoded, and all that is known then.
    """
    env = self._env
    touched = dict.fromkeys(v for s in steps for v in s.reads)
    touched.update(dict.fromkeys(wanted))
    packed = [v for v in touched if v in self._words and v not in env]
    again = [v for v in touched if v in self._split.free and v in env]
    ahead = self._ahead(packed, coming)
    # Nothing waits for the gradients of weights: XLA would keep what they are
    # made of until the end of all.
    done = [v for v in self._loose if v is not token]
    bound = (
      [self._words[v] for v in (*packed, *ahead)],
      [env[v] for v in again],
      [env[v] for v in done],
    )
    if token is not None:
      bound, env[token] = together(bound, env[token])
      env.update(zip(done, bound[2], strict=True))
      self._loose = []
    self._words.update(zip((*packed, *ahead), bound[0], strict=True))
    for value in (*packed, *ahead):
      self._fetch(value)
    local = {**env, **dict(zip(again, bound[1], strict=True))}
    for value in packed:
      local[value] = self._decode(value)
    return packed, local

  def _ahead(
    self, packed: Sequence[Value], coming: collections.deque[Value]
  ) -> list[Value]:
    """The next one to be fetched while those that are needed are used."""
    for value in packed:
      if value in coming:
        coming.remove(value)
    due = any(v in self._far for v in packed)
    return [coming.popleft()] if due and coming else []

  def _fetch(self, value: Value) -> None:
    if value in self._far:
      self._far.remove(value)
      self._words[value] = to_device(self._words[value])

  def _decode(self, value: Value) -> Array:
    residual, words = self._residual[value], self._words[value]
    if not residual.may_overflow:
      return residual.decode(words)
    return lax.cond(
      residual.dropped(words) > 0,
      lambda: self._again(value),
      lambda: residual.decode(words),
    )

  def _again(self, value: Value) -> Array:
    """Computes a residual from those that are all there."""
    known = {
      v: x for v, x in self._env.items() if v not in self._joint.backward
    }
    exact = {v: r for v, r in self._residual.items() if r.is_exact}
    steps = self._joint.order.leading_to(
      [value], collections.ChainMap(known, exact)
    )
    for read_value in dict.fromkeys(v for s in steps for v in s.reads):
      if read_value in exact and read_value not in known:
        words = self._words[read_value]
        if read_value in self._far:
          words = to_device(words)
        known[read_value] = exact[read_value].decode(words)
    evaluate(steps, known)
    return known[value]
