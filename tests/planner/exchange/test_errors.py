"""Encoding errors, measured or bounded, and their sums over tensors."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs
from jaxmotion.planner.exchange._errors import (
  bound_errors,
  measure_errors,
  relative_error_bound,
)
from tests.codecs.table import CODECS
from tests.planner.problems import PARAMS, THREE, gradients, relative_errors


def test_measured_errors_are_those_of_one_encoding():
  grads = gradients()
  found = measure_errors(PARAMS, THREE, grads)
  for i, name in enumerate(sorted(grads)):
    x = grads[name]
    assert found.norms[i] == pytest.approx(np.sum(np.square(x, dtype=float)))
    for j, codec in enumerate(THREE):
      (expected,) = relative_errors(codec, x[None])
      assert found.relative_error(i, j) == pytest.approx(expected)
  assert found.total_error(np.array([0, 0, 0])) == 0
  mixed = np.array([2, 0, 1])
  squares = [found.relative_error(i, c) ** 2 for i, c in enumerate(mixed)]
  expected = math.sqrt(squares @ found.norms / found.norms.sum())
  assert found.total_error(mixed) == pytest.approx(expected)


def test_bounds_must_fit_for_each_tensor_and_measured_errors_in_sum():
  bounds = bound_errors(PARAMS, THREE)
  errors, limit = bounds.squared_limits(0.01)
  assert np.isfinite(errors).tolist() == [[True, True, False]] * 3
  assert errors[:, 1].sum() < limit
  assert bounds.total_error(np.array([0, 1, 0])) == 2**-8
  found = measure_errors(PARAMS, THREE, gradients())
  errors, limit = found.squared_limits(0.01)
  assert np.isfinite(errors).all()
  assert limit == pytest.approx(1e-4 * found.norms.sum())


def test_gradients_are_measured_as_an_exchange_gives_them_to_codecs():
  tiny = {name: 1e-25 * x / 1e-3 for name, x in gradients().items()}
  found = measure_errors(PARAMS, THREE, tiny)
  assert 1e-4 < found.relative_error(1, 1) < 2**-8
  # Both codecs keep bfloat16 unchanged.
  params = {"w": jnp.zeros((64, 64), "bfloat16")}
  x = jnp.asarray(gradients()["first"][:64, :64], "bfloat16")
  found = measure_errors(params, THREE, {"w": x})
  assert found.relative_error(0, 0) == found.relative_error(0, 1) == 0
  assert found.relative_error(0, 2) > 0


NAN = np.full((320, 64), np.nan, "float32")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (
      {"bias": np.float32([0] * 3)},
      r"float32\[320\] at 'bias', got float32\[3",
    ),
    ({"last": NAN}, "`gradients` must be finite.*'last'"),
    (jax.tree.map(np.zeros_like, gradients()), "must not be all zero"),
  ],
)
def test_invalid_gradients_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    measure_errors(PARAMS, THREE, gradients() | change)
  with pytest.raises(ValueError, match="must have the structure of `params`"):
    measure_errors(PARAMS, THREE, {"first": gradients()["first"]})


BOUNDED = """
  identity bf16 truncate1 truncate2_nearest int8 int8_stochastic int4 int1
  int5_minmax sign topk topk_block int4_feedback
  """.split()


def arrays(count):
  """The worst arrays for levels and selections, and random ones."""
  rng = np.random.default_rng(0)
  spike = np.full(count, 0.49 / 127, np.float32)
  spike[::64] = 1.0
  single = np.full(count, 1e-20, np.float32)
  single[count // 2] = 1.0
  yield from (np.ones(count, np.float32), spike, single)
  for power in (1, 5):
    yield (rng.standard_normal(count) ** power).astype("float32")


@pytest.mark.parametrize("name", BOUNDED)
def test_errors_of_the_worst_arrays_are_within_the_bound(name):
  codec = CODECS[name]
  count = 2 * 643  # Not a multiple of a block.
  bound = relative_error_bound(codec, count)
  found = relative_errors(codec, np.stack(list(arrays(count))))
  assert max(found) <= bound * (1 + 1e-6)
  if bound and "feedback" not in name:
    assert max(found) > bound / 30  # Not far above the worst error.


def test_narrow_formats_have_no_bound():
  narrow = codecs.cast("float8_e4m3fn")
  for codec in (narrow, codecs.feedback(narrow)):
    assert relative_error_bound(codec, 10) is None
  with pytest.raises(ValueError, match="`gradients` must be given.*e4m3fn"):
    bound_errors(PARAMS, (codecs.identity(), narrow))
