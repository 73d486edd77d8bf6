"""Judges what a function does with one wrong argument at a time."""

from __future__ import annotations

import contextlib
import inspect
import re
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from tests.arguments.calls import Call
from tests.arguments.wrong_values import RELATIVE, TRACER, wrong_values

Accepted = Mapping[tuple[str, str], Mapping[str, str]]
# Seconds of processor time that a call may take, and of waiting for nothing.
LIMIT_S = 5.0
WAIT_S = 120.0


def find_defects(
  name: str, call: Call, accepted: Accepted, known_bad: Collection[str] = ()
) -> dict[str, list[str]]:
  """Returns what is wrong, by argument.

  A call with a wrong argument has to raise a TypeError or a ValueError that
  names the argument in backticks and says what it got. A value that is accepted
  has to be allowed by the annotation, or be listed in `accepted`.

  Args:
    name: name of the call.
    call: a valid call.
    accepted: labels of values with reasons, by function (or "*") and argument.
    known_bad: arguments of which one defect is enough.
  """
  target = call.target(name)
  error = call.run(target, call.bind(target))
  assert error is None, f"{name}: the valid call raises {error!r}"
  defects: dict[str, list[str]] = {}
  kinds, shown = getattr(target, "declared", {}), set()

  def try_value(
    one: Replacement, value: Any, bound: inspect.BoundArguments | None
  ) -> BaseException | None:
    """Returns the error of a declared kind, or that of the whole call."""
    # A call has shown once that it refuses what its declaration refuses.
    if one.argument in shown:
      try:
        kinds[one.argument](one.argument, value)
      except Exception as error:
        return error
    # Fresh arguments: a call may consume an iterator or donate an array.
    bound = bound or call.bind(target)
    old = bound.arguments[one.outer]
    bound.arguments[one.outer] = _put(old, one.inner, value)
    raised = call.run(target, bound)
    if raised is not None and one.argument in kinds:
      shown.add(one.argument)
    return raised

  def judge(
    one: Replacement, value: Any, bound: inspect.BoundArguments | None = None
  ) -> None:
    if one.argument in known_bad and one.argument in defects:
      return
    with _time_limit():
      raised = try_value(one, value, bound)
    if raised is not None and is_clear(raised, one.names):
      return
    if raised is None:
      listed = (accepted.get((n, one.argument), {}) for n in ("*", name))
      if one.allowed or any(one.label in reasons for reasons in listed):
        return
    outcome = "is accepted" if raised is None else f"raises {raised!r:.300}"
    found = defects.setdefault(one.argument, [])
    found.append(f"{one.label} ({value!r:.60}) {outcome}")

  # Valid arguments are made before a trace starts, which would trace them too.
  traced = []
  for one in _replacements(call, target):
    if one.value is TRACER:
      traced.append((one, call.bind(target)))
    else:
      judge(one, one.value)

  def judge_tracers(tracer: Any) -> None:
    for one, bound in traced:
      judge(one, tracer, bound)

  jax.eval_shape(judge_tracers, jax.ShapeDtypeStruct((), "float32"))
  return defects


def is_clear(error: BaseException, names: Collection[str]) -> bool:
  """Returns whether an error names an argument and what it was."""
  if isinstance(error, OSError):
    return error.filename is not None  # A file that is not there is named.
  named = re.search(rf"`({'|'.join(map(re.escape, names))})\b", str(error))
  clear = isinstance(error, TypeError | ValueError) and "got" in str(error)
  return bool(clear and named)


class Replacement(NamedTuple):
  """A wrong value for one argument of a call.

  Attributes:
    argument: name of the argument.
    names: arguments of which an error has to name one.
    label: name of the value.
    value: what is wrong.
    allowed: whether the function may accept the value.
    outer: parameter that holds the argument.
    inner: place of the argument in variadic parameters.
  """

  argument: str
  names: tuple[str, ...]
  label: str
  value: Any
  allowed: bool
  outer: str
  inner: str | int | None


def _replacements(
  call: Call, target: Callable[..., Any]
) -> Iterator[Replacement]:
  """Yields every wrong value of every argument."""
  signature = inspect.signature(target)
  valid = call.bind(target).arguments
  for name, parameter in signature.parameters.items():
    if parameter.kind is parameter.VAR_KEYWORD:
      places = [(key, name, key) for key in valid[name]]
    elif parameter.kind is parameter.VAR_POSITIONAL:
      places = [(name, name, 0)] if valid[name] else []
    else:
      places = [(name, name, None)]
    for argument, outer, inner in places:
      now = valid[outer] if inner is None else valid[outer][inner]
      for label, value, allowed in wrong_values(argument, parameter, now):
        either = allowed or label in RELATIVE
        names = (argument, *signature.parameters) if either else (argument,)
        yield Replacement(argument, names, label, value, allowed, outer, inner)


def _put(old: Any, place: str | int | None, value: Any) -> Any:
  if place is None:
    return value
  if isinstance(old, dict):
    return {**old, place: value}
  return (value, *old[1:])


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
  """Makes a call that never ends an error, which is a defect.

  The time of other processes on a busy machine does not count.
  """

  def stop(number: int, _: Any) -> None:
    limit = timers[number][1]
    raise TimeoutError(f"the call takes more than {limit:g} s")

  timers = {
    signal.SIGPROF: (signal.ITIMER_PROF, LIMIT_S),
    signal.SIGALRM: (signal.ITIMER_REAL, WAIT_S),
  }
  before = {number: signal.signal(number, stop) for number in timers}
  for timer, limit in timers.values():
    signal.setitimer(timer, limit)
  try:
    yield
  finally:
    for timer, _ in timers.values():
      signal.setitimer(timer, 0)
    for number, handler in before.items():
      signal.signal(number, handler)
