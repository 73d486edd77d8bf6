import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxmotion.core import saturate_cast

FLOATS = (ml_dtypes.bfloat16, np.float16, np.float32)


def test_finite_elements_stay_finite_and_others_stay_what_they_are():
  for source, target in itertools.product(FLOATS, FLOATS):
    most = float(jnp.finfo(source).max)
    x = np.array([most, -most, 1.5, 0, np.inf, -np.inf, np.nan], source)
    y = np.asarray(saturate_cast(jnp.asarray(x), target), np.float64)
    top = np.minimum(most, float(jnp.finfo(target).max)).astype(target)
    np.testing.assert_array_equal(y, [top, -top, *x[2:].astype(np.float64)])
