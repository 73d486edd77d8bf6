"""Gives doctests the names that every reader of a docstring knows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def doctest_names(doctest_namespace):
  doctest_namespace.update(jax=jax, jnp=jnp, np=np)
