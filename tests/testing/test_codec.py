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


def lacking(name, fields=(), base=plain_for_test, **methods):
  """Returns a class of codecs with other methods."""
  return dataclasses.make_dataclass(
    name, fields, bases=(base,), frozen=True, namespace=methods
  )


def keep(change):
  """Returns an `encode` that changes the values."""
  return lambda self, x, state=(), key=None: (Holder(change(x)), state)


def read(change):
  """Returns a `decode` that changes the values."""
  return lambda self, payload, like: change(payload.values)


def is_traced(x):
  return isinstance(x, jax.core.Tracer)


words_of_int32 = lacking("words", encode=keep(lambda x: x.astype(jnp.int32)))
more_than_said = lacking(
  "more_than_said",
  leaf_groups=lambda self, leaves: [
    LeafGroup((i,), codecs.cast("bfloat16")) for i in range(len(leaves))
  ],
)
other_dtype = lacking("other", decode=read(lambda y: y.astype(jnp.bfloat16)))
other_shape = lacking("other", decode=read(lambda y: y.reshape(-1)[None]))
overflows = lacking("overflows", decode=read(lambda y: y / 0.0))
off_by_a_bit = lacking("off", decode=read(lambda y: y * 1.01))
off_by_more_than_stated = lacking(
  "off_more", base=off_by_a_bit, laws=Laws(error=ErrorBound(relative=0.005))
)
grows = lacking(
  "grows",
  init=lambda self, like: jnp.zeros(3),
  encode=lambda self, x, state=(), key=None: (
    Holder(x),
    jnp.concatenate([state, state]),
  ),
)
keeps_nan = lacking(
  "keeps_nan",
  init=lambda self, like: jnp.zeros(like.shape),
  encode=lambda self, x, state=(), key=None: (Holder(x), state + x),
)
holds_an_array_twice = lacking("two", init=lambda self, _: (jnp.zeros(3),) * 2)
add_one = lambda x: x if is_traced(x) else x + 1
eager_differs = lacking("eager", encode=keep(add_one))
eager_decodes_differently = lacking(
  "eager_decodes", decode=read(lambda y: y if is_traced(y) else y + 1)
)
rounds_down = lacking("down", encode=keep(lambda x: jnp.floor(4 * x) / 4))
LEVEL = [("level", int, 0)]
loses_its_field = lacking(
  "loses", LEVEL, config=lambda self: {"name": type(self).__name__}
)


@dataclasses.dataclass(frozen=True, eq=False)
class equal_to_nothing(plain_for_test):
  level: int = 0

  def __eq__(self, other):
    return self is other

  __hash__ = object.__hash__


def test_a_codec_with_all_properties_passes():
  check_codec(plain_for_test(), X)
  check_codec(rounds_down(), X)
  check_codec(off_by_a_bit(), X)
  laws = Laws(contraction=1.0, bounds_memory=True)
  exact = lacking("exact", encode=keep(lambda x: x + 0), laws=laws)
  check_codec(codecs.feedback(exact()), X)
  check_unbiased(plain_for_test(), X, samples=4)


def clip(x):
  """Cuts off what is far beyond the others, of those that are not zero."""
  peak = 2 * jnp.sqrt(jnp.sum(x**2) / jnp.maximum(jnp.sum(x != 0), 1))
  return jnp.clip(x, -peak, peak)


@pytest.mark.parametrize("size", [100, 100_000])
def test_a_codec_that_loses_an_outlier_breaks_its_contraction(size):
  clips = lacking("clips", encode=keep(clip), laws=Laws(contraction=0.5))
  x = np.random.default_rng(0).normal(size=size).astype(np.float32)
  y = np.asarray(clip(x))
  assert np.sum((y - x) ** 2) < 0.05 * np.sum(x**2)
  with pytest.raises(AssertionError, match="breaks its law contraction on row"):
    check_codec(clips(), jnp.asarray(x))


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
    (words_of_int32(), "has a payload of int32, not of unsigned integers"),
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


def test_a_bias_is_named_even_a_small_one_of_a_random_codec():
  inner = codecs.uniform(bits=4, rounding="stochastic")

  class nearly(plain_for_test):
    def encode(self, x, state=(), key=None):
      return inner.encode(x + 0.02, (), key)

    def decode(self, payload, like):
      return inner.decode(payload, like)

  with pytest.raises(AssertionError, match="is biased by"):
    check_unbiased(nearly(), X, samples=4000)
  with pytest.raises(AssertionError, match="is biased by"):
    check_unbiased(rounds_down(), X, samples=50)
