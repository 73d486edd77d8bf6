"""Order of the ops of a step, and lifetimes of its arrays on the device."""

import itertools
import weakref

import jax
import numpy as np
import pytest

from jaxmotion import memory
from tests.memory.helpers import (
  DEVICE,
  PLAIN,
  SGD,
  WIDTH,
  batch_of,
  model_of,
  params_of,
  record_first_step,
)

BLOCKS = 3
STAGES = BLOCKS + 2
PER_STAGE = {"update": "per_stage"}
STREAMED = {"update": "per_stage", "stream_weights": True}


def record_names(**options):
  """Returns the names of a step's ops; repeated ones are merged."""
  # A stage's biases and matrices are two packets.
  _, seen = record_first_step(BLOCKS, tx=SGD, **options)
  return [name for name, _ in itertools.groupby(name for name, *_ in seen)]


def test_a_stage_is_dispatched_before_the_last_is_waited_for():
  forward = ["pack", "send", "unpack", "forward"] * STAGES
  assert record_names() == [*forward, "backward", "return", "update"]
  # Gradients of streamed stages return one stage behind.
  names = record_names(**STREAMED)
  stage_ops = ["send", "unpack", "backward", "return"]
  expected = ["backward", *stage_ops * (STAGES - 1), "update"]
  assert names[names.index("backward") :] == expected


def test_stages_are_updated_when_all_gradients_are_on_the_host():
  _, seen = record_first_step(BLOCKS, tx=SGD, **PER_STAGE)
  names = [name for name, *_ in seen]
  # All backward passes are dispatched before the first is waited for.
  expected = ["backward"] * STAGES + ["return"] * STAGES + ["update"] * STAGES
  assert names[names.index("backward") :] == expected
  # The first stage first. Matrix and bias, but for the last stage.
  updated = [len(out[0]) for name, _, out in seen if name == "update"]
  assert updated == [2] * (STAGES - 1) + [1]


@pytest.mark.parametrize(
  ("options", "decoded", "most"),
  [
    # The first stage's matrix is no residual: there is no x to differentiate.
    ({}, STAGES, STAGES - 1),
    (PER_STAGE, STAGES, STAGES - 1),
    (PLAIN, STAGES, STAGES - 1),
    (STREAMED, 2 * STAGES, 1),
  ],
  ids=["once", "per_stage", "plain", "streamed"],
)
def test_no_weights_stay_on_the_device(options, decoded, most):
  refs, alive = [], []

  def run_op(name, op, *args):
    out = jax.block_until_ready(op(*args))
    if name == "unpack" and out[0].shape == (WIDTH, WIDTH):
      refs.append(weakref.ref(out[0]))
    alive.append(sum(ref() is not None for ref in refs))
    return out

  model = model_of(BLOCKS, tx=SGD, **options)
  model.step(model.init(params_of(BLOCKS)), batch_of(), run_op=run_op)
  assert (len(refs), max(alive)) == (decoded, most)
  assert not any(ref() is not None for ref in refs)


def test_no_stage_is_sent_while_the_last_but_one_still_computes():
  def slow(params, x, batch):
    x = batch if x is None else x
    return jax.lax.fori_loop(0, 100, lambda i, x: x @ params["w"], x)

  stages = [(str(i), slow) for i in range(4)]
  stages.append(("last", lambda p, x, b: x.sum()))
  params = {name: {"w": np.eye(128, dtype=np.float32)} for name, _ in stages}
  computed, is_ready = [], []

  def run_op(name, op, *args):
    if name == "send":
      is_ready.extend(x.is_ready() for x in computed[:-1])
    out = op(*args)
    if name == "forward":
      computed.append(out[0])
    return out

  model = memory.HostResident(stages, SGD, stream_weights=True, device=DEVICE)
  batch = np.ones((128, 128), np.float32)
  model.step(model.init(params), batch, run_op=run_op)
  assert is_ready and all(is_ready)


def test_weights_are_not_residuals():
  """As results of a program they would be copied on the device."""
  _, seen = record_first_step(BLOCKS)
  saved = [out[2].residuals for name, _, out in seen if name == "forward"]
  shapes = [a.shape for residuals in saved for a in residuals]
  assert len(saved) == STAGES and saved[0] and (WIDTH, WIDTH) not in shapes


def test_master_weights_and_references_are_updated_in_place():
  model = model_of(tx=SGD, send_difference=True)
  state, _ = model.step(model.init(params_of()), batch_of())

  def addresses(tree):
    return [a.unsafe_buffer_pointer() for a in jax.tree.leaves(tree)]

  own = addresses((state.device_reference, state.reference))
  assert len(set(own)) == len(own)
  written = lambda state: (state.params, state.device_reference)
  before, masters = addresses(written(state)), jax.tree.leaves(state.params)
  after, _ = model.step(state, batch_of())
  assert addresses(written(after)) == before
  assert all(a.is_deleted() for a in masters)


def test_a_state_that_is_kept_trains_again():
  model = model_of(1, tx=SGD, send_difference=True)
  state = model.init(params_of(1))
  kept, loss = model.step(state, batch_of(), donate=False)
  donated, again = model.step(state, batch_of())
  assert float(loss) == float(again)
  jax.tree.map(np.testing.assert_array_equal, kept, donated)
