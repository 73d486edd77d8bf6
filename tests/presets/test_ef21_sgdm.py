"""The preset computes what EF21 and EF21-SGDM say, written here in numpy."""

import numpy as np
import pytest

from jaxmotion import codecs, presets
from tests.presets.reference import PARAMS, gradients, make_run, pick


def reference(name, momentum, count, steps, start):
  """Means of EF21-SGDM with the greatest elements of each array."""
  average = own = np.zeros_like(gradients(0)[name]).reshape(4, -1)
  for step in range(steps):
    grad = gradients(step)[name].reshape(4, -1)
    keep = momentum if step else 0.0
    average = keep * average + (1 - keep) * grad
    change = average - own
    if step >= start:
      least = np.sort(np.abs(change), axis=1)[:, -count][:, None]
      change = np.where(np.abs(change) >= least, change, 0)
    own = own + change
    yield own.mean(0)


@pytest.mark.parametrize(("momentum", "start"), [(0.9, 1), (0.0, 0)])
def test_means_are_those_of_the_definition(momentum, start):
  tx = presets.ef21_sgdm(
    "data",
    codec=codecs.topk(density=0.1, block=240),
    momentum=momentum,
    start=start,
    min_size=0,
    min_dimensions=0,
  )
  state, update = make_run(tx, pick(PARAMS))
  expected = {
    name: reference(name, momentum, count, 6, start)
    for name, count in [("a", 24), ("b", 2)]
  }
  for step in range(6):
    mean, state = update(pick(gradients(step)), state)
    for name, means in expected.items():
      found = np.asarray(mean[name]).ravel()
      np.testing.assert_allclose(found, next(means), atol=5e-6)
