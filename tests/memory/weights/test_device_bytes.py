"""Predicted peak of device memory against the live arrays of a step."""

import jax
import numpy as np
import pytest

from jaxmotion import codecs
from tests.memory.helpers import (
  DEVICE,
  HOST,
  SGD,
  batch_of,
  model_of,
  params_of,
)

BLOCKS = 6
BATCH = jax.eval_shape(batch_of)
STREAMED = {"stream_weights": True, "update": "per_stage"}


def predict_bytes(model, blocks=BLOCKS, level=0):
  """Predicts a step's peak as if its programs had no temporary buffers."""
  return model.device_bytes(
    params_of(blocks), BATCH, level=level, measure_memory=lambda fn, *args: 0
  )


def peak_live_bytes(model):
  """Runs a step; returns the most bytes of arrays on the device at any time."""
  most = 0

  def run_op(name, op, *args):
    nonlocal most
    out = op(*args)
    most = max(most, live_bytes())
    if name == "return":
      # Where the device is a CPU, the host shares the buffers that it is sent.
      out = jax.device_put(jax.tree.map(np.array, out), HOST)
    return out

  state = model.init(params_of(BLOCKS))
  before = live_bytes()
  model.step(state, batch_of(), run_op=run_op)
  return most - before


def live_bytes():
  return sum(
    a.nbytes
    for a in jax.live_arrays()
    if not a.is_deleted() and a.devices() == {DEVICE}
  )


@pytest.mark.parametrize(
  "options", [STREAMED, {**STREAMED, "weights": codecs.identity()}, {}], ids=str
)
def test_the_prediction_bounds_the_live_arrays_from_above(options):
  model = model_of(BLOCKS, **options)
  live = peak_live_bytes(model)
  assert live <= predict_bytes(model) <= 1.5 * live


def test_differences_and_levels_of_more_bytes_take_more_memory():
  model = model_of(BLOCKS, send_difference=True)
  most = 1.1 * predict_bytes(model_of(BLOCKS))
  # The live arrays leave out the reference, which is there before the step too.
  assert peak_live_bytes(model) <= predict_bytes(model) <= most
  levels = (codecs.uniform(bits=4), codecs.uniform(bits=8))
  model = model_of(BLOCKS, tx=SGD, weights=levels, stream_weights=True)
  low, high = (predict_bytes(model, level=i) for i in (0, 1))
  assert low < high


def test_streaming_holds_two_stages_of_any_number():
  seen = []

  def measure_memory(fn, *args):
    seen.append(fn)
    return 0

  few, many = (
    model_of(n, stream_weights=True).device_bytes(
      params_of(n), BATCH, measure_memory=measure_memory
    )
    for n in (BLOCKS, 2 * BLOCKS)
  )
  assert many - few == BLOCKS * 4 * batch_of()["x"].size
  # Each distinct program is measured once in a model: two passes of first,
  # block and last, and one program that decodes.
  assert len(seen) == 2 * (6 + 1)
