"""Gives doctests the names that every reader of a docstring knows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmotion


def pytest_collection() -> None:
  """Loads the package's own classes, so that their examples are found.

  The package gets them when they are first used.
  """
  for name in jaxmotion.__all__:
    getattr(jaxmotion, name)


@pytest.fixture(autouse=True)
def doctest_names(doctest_namespace):
  doctest_namespace.update(jax=jax, jnp=jnp, np=np)
