"""Errors that are measured, and what they add up to."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs
from jaxmotion.planner.exchange._errors import measured, stated
from tests.planner.problems import PARAMS, THREE, gradients, relative


def test_a_bound_that_is_not_there_is_asked_for():
  narrow = codecs.cast("float8_e4m3fn")
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
