"""States after exceptions: whole, and either the old or the new one."""

import contextlib
import functools
import itertools
import pathlib
import signal
import sys

import jax
import numpy as np
import optax
import pytest

from jaxmotion import codecs, memory
from tests.memory.helpers import (
  ADAM,
  SGD,
  batch_of,
  block,
  copy_tree,
  model_of,
  params_of,
  record_step,
  tree_bits,
)

FOLDER = str(pathlib.Path(memory.__file__).parent / "_weights")
CASES = {
  "once": {},
  "per_stage": {"update": "per_stage"},
  "streamed": {"update": "per_stage", "stream_weights": True},
  "feedback": {
    "send_difference": True,
    "grads": codecs.feedback(codecs.uniform(bits=4)),
    "update": "per_stage",
  },
}
STEPS = 3


class Interrupt(BaseException):
  """An exception of a signal's handler or a hook, like KeyboardInterrupt."""


@contextlib.contextmanager
def handler_of(number, handler):
  """Sets a handler: a test in the background would ignore Ctrl-C."""
  before = signal.signal(number, handler)
  try:
    yield
  finally:
    signal.signal(number, before)


@functools.cache
def run_of(case):
  """Returns a model and NumPy copies of its state after 0, 1, ... steps."""
  model = model_of(tx=ADAM, **CASES[case])
  state = model.init(params_of())
  states = [copy_tree(state)]
  for i in range(STEPS):
    state, _ = model.step(state, batch_of(i))
    states.append(copy_tree(state))
  return model, states


def fail_at(position, when, error=Interrupt):
  """Returns a `run_op` that raises around the op at a position."""
  count = itertools.count()

  def run_op(name, op, *args):
    is_last = next(count) == position
    if is_last and when == "before":
      raise error
    out = op(*args)
    if is_last:
      raise error
    return out

  return run_op


@pytest.mark.parametrize("case", CASES)
def test_a_failure_at_any_op_leaves_the_old_or_the_new_state(case):
  model, states = run_of(case)
  _, seen = record_step(model, model.place_state(states[1]), batch_of(1))
  names = [name for name, *_ in seen]
  assert names.count("update") == (3 if "per_stage" in str(CASES[case]) else 1)
  failures = [(i, "after") for i in range(len(names))]
  for i, when in [(names.index("update"), "before"), *failures]:
    state = model.place_state(states[1])
    with pytest.raises(Interrupt):
      model.step(state, batch_of(1), run_op=fail_at(i, when))
    done = 2 if names[i] == "update" else 1
    assert tree_bits(state) == tree_bits(states[done]), (i, names[i], when)
    if i == 9:
      # Not placed again, and as a notebook does that runs its cell twice.
      found, _ = model.step(state, batch_of(1))
      assert tree_bits(found) == tree_bits(states[2])
  # From the last failure on, training continues bit for bit.
  state = model.place_state(state)
  for i in range(done, STEPS):
    state, _ = model.step(state, batch_of(i))
  assert tree_bits(state) == tree_bits(states[STEPS])


def step_with_signal(model, state, position):
  """Runs a step, sends SIGALRM after some lines, and returns those that ran."""
  # Only lines of the library count; -1 sends nothing. A handler that raises
  # inside of JAX may be ignored or end the process, so that a test cannot send
  # signals by a timer.
  seen = []

  def trace_line(frame, event, arg):
    seen.append((frame.f_code.co_filename, frame.f_lineno))
    if len(seen) == position + 1:
      signal.raise_signal(signal.SIGALRM)
    return trace_line

  def trace_call(frame, event, arg):
    is_ours = frame.f_code.co_filename.startswith(FOLDER)
    return trace_line if is_ours else None

  before = sys.gettrace()
  sys.settrace(trace_call)
  try:
    model.step(state, batch_of(1))
  finally:
    sys.settrace(before)
  return seen


def test_a_signal_at_any_line_leaves_a_whole_state():
  model, states = run_of("feedback")

  def interrupt(number, frame):
    raise Interrupt

  seen = step_with_signal(model, model.place_state(states[1]), -1)
  first_visits = [seen.index(line) for line in dict.fromkeys(seen)]
  found = set()
  with handler_of(signal.SIGALRM, interrupt):
    handlers = [signal.getsignal(n) for n in signal.valid_signals()]
    for position in first_visits:
      state = model.place_state(states[1])
      with pytest.raises(Interrupt):
        step_with_signal(model, state, position)
      step = int(state.step)
      assert tree_bits(state) == tree_bits(states[step]), seen[position]
      found.add(step)
    assert [signal.getsignal(n) for n in signal.valid_signals()] == handlers
  assert found == {1, 2}


def test_ctrl_c_in_an_update_waits_until_all_stages_are_updated():
  model, states = run_of("per_stage")
  state = model.place_state(states[1])

  def run_op(name, op, *args):
    if name == "update":
      signal.raise_signal(signal.SIGINT)
    return op(*args)

  with handler_of(signal.SIGINT, signal.default_int_handler):
    with pytest.raises(KeyboardInterrupt):
      model.step(state, batch_of(1), run_op=run_op)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
  assert tree_bits(state) == tree_bits(states[2])


def make_failing(place, is_failing):
  """Returns stages and an optimizer of which one fails where it says."""

  def check(g):
    if is_failing() and place == "while a function runs":
      raise ValueError("bad data")
    return g

  @jax.custom_vjp
  def watched(x):
    return x

  def backward(_, g):
    return (jax.pure_callback(check, jax.typeof(g), g),)

  watched.defvjp(lambda x: (x, None), backward)

  def update(grads, state, params=None):
    if is_failing() and any(len(g) == 1 for g in jax.tree.leaves(grads)):
      raise ValueError("bad data: matrices alone")
    return grads, state

  stages = [
    ("a", lambda p, x, b: watched(b["x"] @ p["w"])),
    ("b", lambda p, x, b: block(p, x, b).mean()),
  ]
  by_stage = optax.GradientTransformation(lambda params: (), update)
  return stages, by_stage if place == "in one update of two" else SGD


@pytest.mark.parametrize(
  "place", ["while a function runs", "in one update of two"]
)
def test_code_of_a_user_that_fails_leaves_the_state(place):
  failing = False
  stages, tx = make_failing(place, lambda: failing)
  w = np.eye(32, dtype=np.float32)
  params = {"a": {"w": w}, "b": {"w": w, "b": w[:1]}}
  model = memory.HostResident(stages, tx, update="per_stage", min_leaf_size=0)
  state = model.init(params)
  before = copy_tree(state)
  failing = True
  with pytest.raises(Exception, match="bad data"):
    model.step(state, batch_of())
  assert tree_bits(state) == tree_bits(before)
  failing = False
  state, _ = model.step(state, batch_of())
  assert int(state.step) == 1


def test_what_a_step_returned_is_not_lost_with_the_result():
  model, states = run_of("per_stage")
  state = model.place_state(states[1])
  model.step(state, batch_of(1))  # An exception took the result.
  assert tree_bits(state) == tree_bits(states[2])
  with pytest.raises(ValueError, match="`state` must be .* no step has taken"):
    model.step(state, batch_of(2))
  found, _ = model.step(model.place_state(state), batch_of(2))
  assert tree_bits(found) == tree_bits(states[3])
