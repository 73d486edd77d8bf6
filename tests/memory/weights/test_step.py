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
  record_ops,
)

BLOCKS = 3
STAGES = BLOCKS + 2


def step_op_names(**options):
  model = model_of(BLOCKS, tx=SGD, **options)
  seen, run_op = record_ops()
  model.step(model.init(params_of(BLOCKS)), batch_of(), run_op=run_op)
  return [name for name, *_ in seen]


def merge_repeats(names):
  """Merges repeated names: a stage's biases and matrices are two packets."""
  return [name for name, _ in itertools.groupby(names)]


def test_a_stage_is_dispatched_before_the_next_is_waited_for():
  forward = ["pack", "send", "unpack", "forward"] * STAGES
  names = merge_repeats(step_op_names())
  assert names == [*forward, "backward", "return", "update"]


def test_stages_are_updated_when_all_gradients_are_on_the_host():
  names = step_op_names(update="per_stage")
  after_forward = names[names.index("backward") :]
  # All backward passes are dispatched before the first is waited for.
  expected = ["backward"] * STAGES + ["return"] * STAGES + ["update"] * STAGES
  assert after_forward == expected


def test_the_first_stage_is_updated_first():
  seen, run_op = record_ops()
  model = model_of(BLOCKS, tx=SGD, update="per_stage")
  model.step(model.init(params_of(BLOCKS)), batch_of(), run_op=run_op)
  updated = [len(out[0]) for name, _, out in seen if name == "update"]
  # Matrix and bias, but for the last stage.
  assert updated == [2] * (STAGES - 1) + [1]


def test_gradients_of_streamed_stages_return_one_stage_behind():
  options = {"stream_weights": True, "update": "per_stage"}
  names = merge_repeats(step_op_names(**options))
  after_forward = names[names.index("backward") :]
  stage_ops = ["send", "unpack", "backward", "return"]
  expected = ["backward", *stage_ops * (STAGES - 1), "update"]
  assert after_forward == expected


def watch_weights(**options):
  """Returns weak references to decoded matrices, and the live ones by op."""
  refs, alive = [], []

  def run_op(name, op, *args):
    out = jax.block_until_ready(op(*args))
    if name == "unpack" and out[0].shape == (WIDTH, WIDTH):
      refs.append(weakref.ref(out[0]))
    alive.append(sum(ref() is not None for ref in refs))
    return out

  model = model_of(BLOCKS, tx=SGD, **options)
  model.step(model.init(params_of(BLOCKS)), batch_of(), run_op=run_op)
  return refs, alive


@pytest.mark.parametrize("options", [{}, {"update": "per_stage"}, PLAIN])
def test_no_weights_stay_on_the_device(options):
  refs, alive = watch_weights(**options)
  # The first stage's matrix is no residual: there is no x to differentiate.
  assert len(refs) == STAGES and max(alive) == STAGES - 1
  assert not any(ref() is not None for ref in refs)


def test_a_streamed_stage_is_freed_before_the_next_is_decoded():
  refs, alive = watch_weights(stream_weights=True, update="per_stage")
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

  def run_op(name, op, *args):
    if name == "send":
      ready.extend(x.is_ready() for x in computed[:-1])
    out = op(*args)
    if name == "forward":
      computed.append(out[0])
    return out

  model = memory.HostResident(stages, SGD, stream_weights=True, device=DEVICE)
  state = model.init(params)
  batch = np.ones((128, 128), np.float32)
  model.step(state, batch, run_op=run_op)
  assert ready and all(ready)


def test_weights_are_not_residuals():
  """As results of a program they would be copied on the device."""
  seen, run_op = record_ops()
  model = model_of(BLOCKS)
  model.step(model.init(params_of(BLOCKS)), batch_of(), run_op=run_op)
  saved = [out[2] for name, _, out in seen if name == "forward"]
  for residuals in saved:
    shapes = [a.shape for a in residuals.residuals]
    assert (WIDTH, WIDTH) not in shapes
  assert len(saved) == STAGES and saved[0].residuals


def test_master_weights_are_updated_in_place():
  model = model_of(tx=SGD)
  state = model.init(params_of())
  state, _ = model.step(state, batch_of())

  def addresses(state):
    return [a.unsafe_buffer_pointer() for a in jax.tree.leaves(state.params)]

  before, leaves = addresses(state), jax.tree.leaves(state.params)
  after, _ = model.step(state, batch_of())
  assert addresses(after) == before
  assert all(a.is_deleted() for a in leaves)


def test_references_are_updated_in_place_on_the_device():
  model = model_of(send_difference=True)
  state, _ = model.step(model.init(params_of()), batch_of())

  def addresses(state):
    leaves = jax.tree.leaves(state.device_reference)
    return [a.unsafe_buffer_pointer() for a in leaves]

  before = addresses(state)
  host = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(state.reference)]
  assert len({*before, *host}) == len(before) + len(host)
  after, _ = model.step(state, batch_of())
  assert addresses(after) == before


def test_a_step_that_fails_before_it_packs_leaves_the_state():
  model = model_of()
  state = model.init(params_of())
  with pytest.raises(ValueError, match="`level`"):
    model.step(state, batch_of(), 7)
  wrong = {"x": np.ones((2, WIDTH + 1), np.float32), "y": np.ones(1)}
  with pytest.raises(TypeError):
    model.step(state, wrong)
  model.step(state, batch_of())


def test_a_donated_state_is_refused_and_a_kept_one_trains_again():
  model = model_of(1, tx=SGD, send_difference=True)
  state = model.init(params_of(1))
  kept, loss = model.step(state, batch_of(), donate=False)
  donated, again = model.step(state, batch_of())
  assert float(loss) == float(again)
  for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(donated), strict=True):
    np.testing.assert_array_equal(a, b)
  with pytest.raises(ValueError, match="`state` must be .* no step has taken"):
    model.step(state, batch_of())
