"""Each check catches the codec that lacks the property."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs
from jaxmotion.codecs import Codec, ErrorBound, Laws
from jaxmotion.codecs.extend import LeafGroup
from jaxmotion.testing import check_codec, check_round_trips, check_unbiased

X = jnp.asarray(np.random.default_rng(0).normal(size=12), jnp.float32)


class Holder(NamedTuple):
  values: jax.Array


@dataclasses.dataclass(frozen=True)
class plain_for_test(Codec):
  """Has every property; each of the others lacks one."""

  def encode(self, x, state=(), key=None):
    return Holder(x), state

  def decode(self, payload, like):
    return payload.values.astype(like.dtype).reshape(like.shape)


class words_of_int32(plain_for_test):
  def encode(self, x, state=(), key=None):
    return Holder(x.astype(jnp.int32)), state


class more_than_said(plain_for_test):
  def leaf_groups(self, leaves):
    return [
      LeafGroup((i,), codecs.cast("bfloat16")) for i in range(len(leaves))
    ]


class other_dtype(plain_for_test):
  def decode(self, payload, like):
    return payload.values.astype(jnp.bfloat16)


class other_shape(plain_for_test):
  def decode(self, payload, like):
    return payload.values.reshape(-1)[None]


class overflows(plain_for_test):
  def decode(self, payload, like):
    return payload.values / 0.0


class off_by_a_bit(plain_for_test):
  def decode(self, payload, like):
    return payload.values * 1.01


class off_by_more_than_stated(off_by_a_bit):
  @property
  def laws(self):
    return Laws(error=ErrorBound(relative=0.005))


class grows(plain_for_test):
  def init(self, like):
    return jnp.zeros(3)

  def encode(self, x, state=(), key=None):
    return Holder(x), jnp.concatenate([state, state])


class keeps_nan(plain_for_test):
  def init(self, like):
    return jnp.zeros(like.shape)

  def encode(self, x, state=(), key=None):
    return Holder(x), state + x


class holds_an_array_twice(plain_for_test):
  def init(self, like):
    return (jnp.zeros(3),) * 2


class eager_differs(plain_for_test):
  def encode(self, x, state=(), key=None):
    return Holder(x if isinstance(x, jax.core.Tracer) else x + 1), state


class eager_decodes_differently(plain_for_test):
  def decode(self, payload, like):
    traced = isinstance(payload.values, jax.core.Tracer)
    return payload.values if traced else payload.values + 1


@dataclasses.dataclass(frozen=True)
class loses_its_field(plain_for_test):
  level: int = 0

  def config(self):
    return {"name": type(self).__name__}


@dataclasses.dataclass(frozen=True, eq=False)
class equal_to_nothing(plain_for_test):
  level: int = 0

  def __eq__(self, other):
    return self is other

  __hash__ = object.__hash__


@dataclasses.dataclass(frozen=True)
class rounds_down(plain_for_test):
  def encode(self, x, state=(), key=None):
    return Holder(jnp.floor(4 * x) / 4), state


def test_a_codec_with_all_properties_passes():
  check_codec(plain_for_test(), X)
  check_codec(rounds_down(), X)
  check_codec(off_by_a_bit(), X)
  check_unbiased(plain_for_test(), X, samples=4)


def test_many_arrays_are_checked_in_one_program():
  arrays = [X, X.astype(jnp.bfloat16), X[:0], X[0]]
  check_round_trips(plain_for_test(), arrays)
  for codec in (grows(), more_than_said(), other_dtype(), overflows()):
    with pytest.raises(AssertionError):
      check_round_trips(codec, arrays)
  with pytest.raises(AssertionError, match="breaks its law error on row 0"):
    check_round_trips(off_by_more_than_stated(), [X])


@pytest.mark.parametrize(
  ("codec", "message"),
  [
    (words_of_int32(), "has a payload of int32"),
    (more_than_said(), "has 48 bytes, not 24"),
    (other_dtype(), r"decodes float32\[12\] to bfloat16\[12\]"),
    (other_shape(), r"decodes float32\[12\] to float32\[1,12\]"),
    (off_by_more_than_stated(), "breaks its law error on row 0"),
    (overflows(), "makes a finite array non-finite"),
    (grows(), "compiles again|shapes of its state"),
    (keeps_nan(), "keeps a NaN in its state"),
    (holds_an_array_twice(), "holds one array twice"),
    (eager_differs(), "jit and eager payloads differ"),
    (eager_decodes_differently(), "jit and eager decode differ"),
    (loses_its_field(3), "is not its config"),
    (equal_to_nothing(3), "is not its config"),
  ],
  ids=lambda v: type(v).__name__ if isinstance(v, Codec) else "",
)
def test_a_missing_property_is_named(codec, message):
  with pytest.raises(AssertionError, match=message):
    check_codec(codec, X)


def test_a_payload_of_float64_is_named():
  class wide(plain_for_test):
    def encode(self, x, state=(), key=None):
      return Holder(x.astype(jnp.float64)), state

  with jax.enable_x64(True):
    with pytest.raises(AssertionError, match="has a payload of float64"):
      check_codec(wide(), X)


def test_a_bias_is_named():
  with pytest.raises(AssertionError, match="is biased by"):
    check_unbiased(rounds_down(), X, samples=50)


def test_a_small_bias_of_a_random_codec_is_named():
  inner = codecs.uniform(bits=4, rounding="stochastic")

  class nearly(plain_for_test):
    def encode(self, x, state=(), key=None):
      return inner.encode(x + 0.02, (), key)

    def decode(self, payload, like):
      return inner.decode(payload, like)

  with pytest.raises(AssertionError, match="is biased by"):
    check_unbiased(nearly(), X, samples=4000)
