import numpy as np
import pytest

from jaxmotion.hetero import assign_microbatches

X = {"x": np.arange(22, dtype=np.float32).reshape(11, 2), "y": np.arange(11)}


@pytest.mark.parametrize("counts", [(2, 2, 2), (6, 0, 0), (0, 1, 5)])
def test_every_example_is_dealt_once_and_in_order(counts):
  options = dict(microbatch=2, max_microbatches=6)
  dealt, valid = assign_microbatches(X, counts, **options)
  assert dealt["x"].shape == (3 * 6 * 2, 2)
  assert dealt["x"].dtype == np.float32
  np.testing.assert_array_equal(dealt["x"][valid], X["x"])
  np.testing.assert_array_equal(dealt["y"][valid], X["y"])
  # Only the last microbatch is not full.
  own = valid.reshape(3, 6, 2)
  assert own.any(axis=2).sum(axis=1).tolist() == list(counts)
  assert valid.sum() == 11
  assert not dealt["x"][~valid].any()


@pytest.mark.parametrize(
  ("counts", "options", "message"),
  [
    ((2, 2, 1), {}, r"`counts` must sum to the 6 .* of 11 .*sum to 5"),
    ((3, 3, 1), {}, "which sum to 7"),
    ((7, -1, 0), {"max_microbatches": 9}, r"`counts` must .*in \[0, 9\], got"),
    ((4, 1, 1), {"max_microbatches": 3}, r"`counts` must be .*in \[0, 3\]"),
    ((2.0, 2.0, 2.0), {}, "`counts` must be integers"),
    (((2, 2, 2),), {}, "`counts` must be integers"),
    ((2,), {"batch": (np.ones(2), np.ones(3))}, r"`batch` .*\[\(2,\), \(3,\)"),
  ],
)
def test_bad_arguments_are_named(counts, options, message):
  options = {"batch": X, "microbatch": 2, "max_microbatches": 6} | options
  with pytest.raises(ValueError, match=message):
    assign_microbatches(counts=counts, **options)
