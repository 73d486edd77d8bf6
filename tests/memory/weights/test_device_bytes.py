"""What a host-resident model says that it takes, beside what is there."""

import jax
import optax
import pytest

from jaxmotion import codecs
from tests.memory.helpers import DEVICE, batch_of, model_of, params_of

BLOCKS = 6
BATCH = jax.tree.map(
  lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch_of()
)


def no_temp(fn, *args):
  del fn, args
  return 0


def watched(model, params):
  """The most bytes of arrays on the device at any time of a step."""
  most = 0

  def call(name, piece, *args):
    nonlocal most
    out = piece(*args)
    most = max(most, live_bytes())
    return out

  state = model.init(params)
  before = live_bytes()
  model.step(state, batch_of(), run_op=call)
  return most - before


def live_bytes():
  return sum(
    a.nbytes
    for a in jax.live_arrays()
    if not a.is_deleted() and a.devices() == {DEVICE}
  )


@pytest.mark.parametrize(
  "options",
  [
    # A CPU's host shares the buffers of gradients that it is sent, so that
    # those of the "once" update would be on the device until the end.
    {"stream_weights": True, "update": "per_stage"},
    {
      "stream_weights": True,
      "update": "per_stage",
      "weights": codecs.identity(),
    },
    {},
  ],
  ids=str,
)
def test_arrays_on_the_device_are_as_many_bytes_as_it_says(options):
  model = model_of(BLOCKS, **options)
  params = params_of(BLOCKS)
  said = model.device_bytes(params, BATCH, measure_memory=no_temp)
  there = watched(model, params)
  assert there <= said <= 1.5 * there


def test_differences_hold_all_weights_on_the_device():
  params = params_of(BLOCKS)
  model = model_of(BLOCKS, send_difference=True)
  plain = model_of(BLOCKS)
  there = watched(model, params)
  said = model.device_bytes(params, BATCH, measure_memory=no_temp)
  # They are there before the step too.
  assert there <= said
  assert said <= 1.1 * plain.device_bytes(params, BATCH, measure_memory=no_temp)


def test_streaming_holds_two_stages_however_many_there_are():
  few, many = (
    model_of(n, stream_weights=True).device_bytes(params_of(n), BATCH)
    for n in (BLOCKS, 2 * BLOCKS)
  )
  inputs = 4 * batch_of()["x"].size
  assert many - few == BLOCKS * inputs


def test_each_distinct_program_is_compiled_once():
  seen = []

  def temp_bytes(fn, *args):
    seen.append(fn)
    return 0

  for n in (BLOCKS, 2 * BLOCKS):
    seen.clear()
    model_of(n, stream_weights=True).device_bytes(
      params_of(n), BATCH, measure_memory=temp_bytes
    )
    # Two passes of first, block and last; weights are unpacked alike.
    assert len(seen) == 6 + 1


def test_a_level_of_more_bytes_takes_more():
  ladder = (codecs.uniform(bits=4), codecs.uniform(bits=8))
  model = model_of(
    BLOCKS, tx=optax.sgd(0.1), weights=ladder, stream_weights=True
  )
  low, high = (
    model.device_bytes(
      params_of(BLOCKS), BATCH, level=i, measure_memory=no_temp
    )
    for i in (0, 1)
  )
  assert low < high
