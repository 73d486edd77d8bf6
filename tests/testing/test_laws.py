"""Each law is found broken by a codec that states it and does not keep it."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion.codecs import (
  Codec,
  ErrorBound,
  Laws,
  chain,
  random_k,
  zero_value,
)
from jaxmotion.testing import find_breaches, make_rows

ROWS = make_rows(np.random.default_rng(0).normal(size=12).astype(np.float32))


class Held(NamedTuple):
  values: jax.Array


@dataclasses.dataclass(frozen=True)
class states_for_test(Codec):
  """States laws, and decodes to a function of the array."""

  stated: Laws
  fn: object = None
  random: bool = False

  @property
  def laws(self):
    return self.stated

  @property
  def needs_key(self):
    return self.random

  def encode(self, x, state=(), key=None):
    if self.random:
      return Held(self.fn(x, key)), state
    return Held(self.fn(x) if self.fn else x), state

  def decode(self, payload, like):
    return payload.values


@dataclasses.dataclass(frozen=True)
class sums_for_test(states_for_test):
  summable = True

  def decode(self, payload, like):
    return payload.values**2


def overflow(x):
  return jnp.where(jnp.abs(x) > 1e38, jnp.inf, x)


def draw(x, key):
  return jnp.where(key.worker % 2 == 0, 1.4, 0.0) * x


def draw_most(x, key):
  return jnp.where(key.worker % 8 == 0, 1.0, 0.0) * x


BROKEN = {
  "lossless": (dict(lossless=True), lambda x: jnp.abs(x)),
  "keeps_zeros": (dict(keeps_zeros=True), lambda x: x + 1.0),
  "keeps_finite": (dict(keeps_finite=True), overflow),
  "idempotent": (dict(idempotent=True), lambda x: x * 0.99),
  "unbiased": (dict(unbiased=True), draw),
  "projects": (dict(projects=True), lambda x: x * 0.99),
  "contraction": (dict(contraction=0.5), lambda x: x * 0.25),
  "bounds_memory": (dict(bounds_memory=True), lambda x: x * 0.001),
  "error": (dict(error=ErrorBound(relative=0.1)), lambda x: x * 0.89),
  "nonfinite": (dict(nonfinite="element"), jnp.nan_to_num),
}


def test_every_law_is_here():
  # `largest` says where the others hold.
  fields = {field.name for field in dataclasses.fields(Laws)}
  assert set(BROKEN) == fields - {"largest"}


@pytest.mark.parametrize("law", BROKEN)
def test_a_broken_law_is_found(law):
  stated, fn = BROKEN[law]
  codec = states_for_test(Laws(**stated), fn, random=law == "unbiased")
  assert {breach.law for breach in find_breaches(codec, ROWS)} == {law}


@pytest.mark.parametrize("nonfinite", ["block", "array"])
def test_a_non_finite_element_that_vanishes_is_found(nonfinite):
  codec = states_for_test(Laws(nonfinite=nonfinite), jnp.nan_to_num)
  assert find_breaches(codec, ROWS)


def test_a_contraction_that_holds_on_average_only_for_other_keys_is_found():
  codec = states_for_test(Laws(contraction=0.5), draw_most, random=True)
  (law,) = {breach.law for breach in find_breaches(codec, ROWS)}
  assert law == "contraction"


def draw_crowds(x, key):
  alone = jnp.max(jnp.abs(x)) > 0.9 * jnp.sqrt(jnp.sum(x**2))
  return jnp.where(alone & (key.worker % 8 != 0), 0.0, 1.0) * x


def test_an_element_alone_that_is_rarely_drawn_is_found():
  codec = states_for_test(Laws(contraction=0.5), draw_crowds, random=True)
  found = {(breach.law, breach.row) for breach in find_breaches(codec, ROWS)}
  assert found == {("contraction", 4)}
  kept = states_for_test(Laws(contraction=0.1), draw_crowds, random=True)
  assert find_breaches(kept, ROWS) == []


def test_payloads_that_may_not_be_added_are_found():
  codec = sums_for_test(Laws())
  assert {breach.law for breach in find_breaches(codec, ROWS)} == {"summable"}
  assert find_breaches(random_k(density=0.3), ROWS) == []


def test_what_a_codec_does_not_state_is_not_asked():
  assert find_breaches(states_for_test(Laws(), lambda x: 7 + 0 * x), ROWS) == []
  codec = chain(random_k(density=0.5, scaled=False), zero_value(capacity=0.3))
  assert find_breaches(codec, jnp.ones((4, 12))) == []
