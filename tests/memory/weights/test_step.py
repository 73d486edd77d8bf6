"""The order of a step, and what it leaves on the device."""

import itertools
import weakref

import jax
import numpy as np
import optax
import pytest

from jaxmotion import memory
from tests.memory.helpers import (
  DEVICE,
  PLAIN,
  WIDTH,
  batch_of,
  model_of,
  params_of,
  recorder,
)

BLOCKS = 3
STAGES = BLOCKS + 2


def names_of_a_step(**options):
  model = model_of(BLOCKS, tx=optax.sgd(0.1), **options)
  seen, call = recorder()
  model.step(model.init(params_of(BLOCKS)), batch_of(), run_op=call)
  return [name for name, *_ in seen]


def collapsed(names):
  """Biases and matrices are packets of their own: one after the other."""
  return [name for name, _ in itertools.groupby(names)]


def test_a_stage_computes_before_the_next_is_waited_for():
  going = ["pack", "send", "unpack", "forward"] * STAGES
  names = collapsed(names_of_a_step())
  assert names == [*going, "backward", "return", "update"]


def test_stages_are_updated_as_their_gradients_arrive():
  names = names_of_a_step(update="per_stage")
  coming = names[names.index("backward") :]
  # All are computing before the first is waited for.
  expected = ["backward"] * STAGES + ["return", "update"] * STAGES
  assert coming == expected


def test_streamed_stages_come_back_one_behind():
  names = names_of_a_step(stream_weights=True, update="per_stage")
  coming = collapsed(names)[collapsed(names).index("backward") :]
  again = ["send", "unpack", "backward", "return", "update"]
  expected = ["backward", *again * (STAGES - 1), "return", "update"]
  assert coming == expected


def watch(**options):
  """(references to unpacked matrices, how many lived after each piece)."""
  refs, alive = [], []

  def call(name, piece, *args):
    out = jax.block_until_ready(piece(*args))
    if name == "unpack" and out[0].shape == (WIDTH, WIDTH):
      refs.append(weakref.ref(out[0]))
    alive.append(sum(ref() is not None for ref in refs))
    return out

  model = model_of(BLOCKS, tx=optax.sgd(0.1), **options)
  model.step(model.init(params_of(BLOCKS)), batch_of(), run_op=call)
  return refs, alive


@pytest.mark.parametrize("options", [{}, {"update": "per_stage"}, PLAIN])
def test_no_weights_stay_on_the_device(options):
  refs, alive = watch(**options)
  # The first stage's are not needed again: there is no x to differentiate.
  assert len(refs) == STAGES and max(alive) == STAGES - 1
  assert not any(ref() is not None for ref in refs)


def test_a_streamed_stage_leaves_before_the_next_arrives():
  refs, alive = watch(stream_weights=True, update="per_stage")
  assert len(refs) == 2 * STAGES and max(alive) == 1


def test_no_stage_is_sent_while_the_last_but_one_still_computes():
  def slow(params, x, batch):
    x = batch if x is None else x
    return jax.lax.fori_loop(0, 100, lambda i, x: x @ params["w"], x)

  stages = [(str(i), slow) for i in range(4)] + [
    ("last", lambda p, x, b: x.sum())
  ]
  params = {name: {"w": np.eye(128, dtype=np.float32)} for name, _ in stages}
  computed, ready = [], []

  def call(name, piece, *args):
    if name == "send":
      ready.extend(x.is_ready() for x in computed[:-1])
    out = piece(*args)
    if name == "forward":
      computed.append(out[0])
    return out

  model = memory.HostResident(
    stages, optax.sgd(0.1), stream_weights=True, device=DEVICE
  )
  state = model.init(params)
  batch = np.ones((128, 128), np.float32)
  model.step(state, batch, run_op=call)
  assert ready and all(ready)


def test_weights_are_no_residuals():
  """As outputs of a program they would be copied on the device."""
  seen, call = recorder()
  model = model_of(BLOCKS)
  model.step(model.init(params_of(BLOCKS)), batch_of(), run_op=call)
  saved = [out[2] for name, _, out in seen if name == "forward"]
  for residuals in saved:
    shapes = [a.shape for a in residuals.residuals]
    assert (WIDTH, WIDTH) not in shapes
  assert len(saved) == STAGES and saved[0].residuals


def test_master_weights_are_updated_in_place():
  model = model_of(tx=optax.sgd(0.1))
  state = model.init(params_of())
  state, _ = model.step(state, batch_of())

  def places(state):
    return [a.unsafe_buffer_pointer() for a in jax.tree.leaves(state.params)]

  before = places(state)
  after, _ = model.step(state, batch_of())
  assert places(after) == before
  assert all(a.is_deleted() for a in jax.tree.leaves(state.params))


def test_held_weights_are_updated_in_place():
  model = model_of(send_difference=True)
  state, _ = model.step(model.init(params_of()), batch_of())

  def places(state):
    leaves = jax.tree.leaves((state.reference, state.device_reference))
    return [a.unsafe_buffer_pointer() for a in leaves]

  before = places(state)
  assert len(set(before)) == len(before)
  after, _ = model.step(state, batch_of())
  assert places(after) == before


def test_a_step_that_fails_before_it_packs_leaves_the_state():
  model = model_of()
  state = model.init(params_of())
  with pytest.raises(ValueError, match="`level`"):
    model.step(state, batch_of(), 7)
  wrong = {"x": np.ones((2, WIDTH + 1), np.float32), "y": np.ones(1)}
  with pytest.raises(TypeError):
    model.step(state, wrong)
  model.step(state, batch_of())
