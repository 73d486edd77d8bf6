"""Errors that are measured, and bounds that hold."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs, make_key
from jaxmotion.planner._bounds import stated_error
from jaxmotion.planner._errors import measured, stated
from tests.planner.problems import PARAMS, THREE, gradients

STATED = {
  "identity": codecs.identity(),
  "bf16": codecs.cast("bfloat16"),
  "truncate1": codecs.truncate(bytes=1),
  "truncate2": codecs.truncate(bytes=2),
  "truncate2_nearest": codecs.truncate(bytes=2, rounding="nearest"),
  "int8": codecs.uniform(bits=8),
  "int8_stochastic": codecs.uniform(bits=8, rounding="stochastic"),
  "int4": codecs.uniform(bits=4, block=64),
  "int4_minmax": codecs.uniform(bits=4, symmetric=False),
  "int2": codecs.uniform(bits=2, block=64),
  "int1": codecs.uniform(bits=1, block=64),
  "sign": codecs.sign(block=64),
  "topk": codecs.topk(density=0.1),
  "topk_most": codecs.topk(density=0.7),
  "topk_block": codecs.topk(density=0.1, block=40),
  "int4_feedback": codecs.feedback(codecs.uniform(bits=4)),
}


def arrays(count):
  """The worst there is for levels and selections, and ordinary ones."""
  rng = np.random.default_rng(0)
  spike = np.full(count, 0.49 / 127, np.float32)
  spike[::64] = 1.0
  single = np.full(count, 1e-20, np.float32)
  single[count // 2] = 1.0
  yield from (np.ones(count, np.float32), spike, single)
  for power in (1, 5):
    yield (rng.standard_normal(count) ** power).astype("float32")


def relative(codec, x):
  @jax.jit
  def round_trip(x):
    payload, _ = codec.encode(x, codec.init(x), make_key(0))
    return codec.decode(payload, x)

  y = np.stack([np.asarray(round_trip(row), np.float64) for row in x])
  lost, whole = (
    np.linalg.norm(a.reshape(len(a), -1), axis=1)
    for a in (y - x, x.astype(np.float64))
  )
  return lost / whole


@pytest.mark.parametrize("name", STATED)
def test_no_error_is_beyond_what_is_stated(name):
  codec = STATED[name]
  count = 2 * 643  # No multiple of a block.
  bound = stated_error(codec, count)
  found = relative(codec, np.stack(list(arrays(count))))
  assert max(found) <= bound * (1 + 1e-6)
  if bound and "feedback" not in name:
    assert max(found) > bound / 30  # It says something.


def test_a_bound_that_is_not_there_is_none_and_is_asked_for():
  narrow = codecs.cast("float8_e4m3fn")
  assert stated_error(narrow, 10) is None
  assert stated_error(codecs.feedback(narrow), 10) is None
  with pytest.raises(ValueError, match="`gradients` must be given.*e4m3fn"):
    stated(PARAMS, (codecs.identity(), narrow))


def test_measured_errors_are_those_of_one_encoding():
  grads = gradients()
  found = measured(PARAMS, THREE, grads)
  for i, name in enumerate(sorted(grads)):
    x = grads[name]
    assert found.norms[i] == pytest.approx(np.sum(np.square(x, dtype=float)))
    for j, codec in enumerate(THREE):
      (expected,) = relative(codec, x[None])
      assert found.relative(i, j) == pytest.approx(expected)
  assert found.total(np.array([0, 0, 0])) == 0
  mixed = np.array([2, 0, 1])
  lost = sum(
    found.relative(i, c) ** 2 * found.norms[i] for i, c in enumerate(mixed)
  )
  assert found.total(mixed) == pytest.approx(
    math.sqrt(lost / found.norms.sum())
  )


def test_bounds_have_to_fit_for_every_tensor_and_measured_errors_together():
  bounds = stated(PARAMS, THREE)
  errors, limit = bounds.limits(0.01)
  assert np.isfinite(errors).tolist() == [[True, True, False]] * 3
  assert errors[:, 1].sum() < limit
  assert bounds.total(np.array([0, 1, 0])) == 2**-8
  found = measured(PARAMS, THREE, gradients())
  errors, limit = found.limits(0.01)
  assert np.isfinite(errors).all()
  assert limit == pytest.approx(1e-4 * found.norms.sum())


def test_tiny_gradients_have_an_error_too():
  tiny = {name: 1e-25 * x / 1e-3 for name, x in gradients().items()}
  found = measured(PARAMS, THREE, tiny)
  assert 1e-4 < found.relative(1, 1) < 2**-8


def test_narrow_gradients_are_compared_as_float32():
  params = {"w": jnp.zeros((64, 64), "bfloat16")}
  x = jnp.asarray(gradients()["first"][:64, :64], "bfloat16")
  found = measured(params, THREE, {"w": x})
  # They are words of their own dtype already.
  assert found.relative(0, 0) == found.relative(0, 1) == 0
  assert found.relative(0, 2) > 0


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda g: {"first": g["first"]}, "must have the structure of `params`"),
    (
      lambda g: g | {"bias": np.zeros(3, "float32")},
      r"float32\[320\] at 'bias', got float32\[3\]",
    ),
    (
      lambda g: g | {"last": np.full((320, 64), np.nan, "float32")},
      "`gradients` must be finite.*'last'",
    ),
    (
      lambda g: {k: np.zeros_like(x) for k, x in g.items()},
      "must not be all zero",
    ),
  ],
)
def test_gradients_that_cannot_be_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    measured(PARAMS, THREE, change(gradients()))
