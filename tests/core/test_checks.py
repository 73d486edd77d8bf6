import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import core

NAN, INF = np.nan, np.inf


def refuse(error, said, kind, values):
  """Checks that each value is refused by its name."""
  for value in values:
    with pytest.raises(error) as raised:
      kind("x/0", value)
    assert type(raised.value) is error
    assert str(raised.value).startswith("`x/0` must be ")
    assert said in str(raised.value)


def test_integers_are_of_a_range_and_arrays_are_explained():
  bits = core.integer(1, 8)
  for value in (1, 4, 8):
    assert bits("bits", value) == value
  core.integer(1)("block", 10**30)
  refuse(ValueError, "an integer in [1, 8], got", bits, (0, 9, -1))
  refuse(ValueError, "an integer >= 1, got 0", core.integer(1), [0])
  wrong = True, np.True_, np.int32(4), 1.0, "1", None
  refuse(TypeError, "an integer in [1, 8], got", bits, wrong)
  hint = r"an array, \w+\[\]: write a Python number. .*`static_args`"
  with pytest.raises(TypeError, match=f"`bits` must be an integer .* {hint}"):
    bits("bits", jnp.int32(4))
  with pytest.raises(TypeError, match=f"`b1` must be a number .* {hint}"):
    jax.jit(lambda b1: core.number(0, 1)("b1", b1))(0.9)


def test_numbers_are_finite_and_of_an_interval():
  density = core.number(0, 1, open_low=True)
  for value in (1, 1.0, 1e-30):
    assert density("density", value) is value
  core.number(0, 1, open_high=True)("density", 0)
  outside = 0, -0.5, 1.0001, NAN, INF
  refuse(ValueError, "in (0, 1], got", density, outside)
  below = core.number(0, 1, open_high=True)
  refuse(ValueError, "in [0, 1), got 1", below, [1])
  said = "a number in (-inf, inf), "
  refuse(ValueError, said, core.number(), (NAN, INF, -INF))
  wrong = True, "1", None, [0.5]
  refuse(TypeError, "a number in [0, 1], got", core.number(0, 1), wrong)


def test_floating_arrays_and_shapes_pass():
  for dtype in ("float32", "bfloat16", "float8_e4m3fn"):
    core.float_array("x", jnp.zeros(2, dtype))
    core.float_array("x", jax.ShapeDtypeStruct((2,), dtype))
  for dtype in ("int32", "uint8", "bool", "complex64"):
    x = jnp.zeros((2, 3), dtype)
    refuse(TypeError, f"array, got {dtype}[2,3]", core.float_array, [x])
  refuse(TypeError, "array, got 1.5", core.float_array, [1.5])


def test_trees_have_arrays_and_are_compared_by_structure_and_shapes():
  like = jax.ShapeDtypeStruct((2,), "float32")
  leaves = [np.zeros(3), jnp.zeros(2), jax.random.key(0), 1.5, like, None]
  assert core.arrays("x", leaves) is leaves
  wrong = [{"a": leaf} for leaf in ("text", object(), dict, 10**30)]
  refuse(TypeError, " at 'a'.", core.arrays, wrong)
  refuse(TypeError, "got 1.5 at '0'", core.typed_arrays, [[1.5]])

  def check(name, value):
    core.check_like(name, value, {"a": like}, "`init`")

  check("state", {"a": np.zeros(2)})
  refuse(ValueError, "got float32[3] at", check, [{"a": jnp.ones(3)}])
  refuse(ValueError, "that of `init`, got PyTree", check, [[np.ones(2)]])
  refuse(TypeError, "a tree of arrays", check, [{"a": "b"}])


def test_other_values_are_of_one_kind():
  method = core.choice((None, "gather"))
  assert method("method", None) is None
  refuse(ValueError, "one of None, 'gather', got 'ring'", method, ["ring"])
  refuse(ValueError, "one of 1, got True", core.choice((1,)), [True])
  assert core.function("fn", len) is len
  refuse(TypeError, "a function, got 3", core.function, [3])
  assert core.boolean("overlap", False) is False
  flags = 1, 0, None, np.True_, "True"
  refuse(TypeError, "True or False, got", core.boolean, flags)
  assert core.text("name", "") == ""
  refuse(TypeError, "a string, got 3", core.text, [3])
  key = core.instance(int, "an int")
  refuse(TypeError, "an int, got 'a'", key, ["a"])
  assert core.optional(key)("key", None) is None
  refuse(TypeError, "an int, got 'a'", core.optional(key), ["a"])


def test_sequences_are_lists_and_mappings_have_strings_as_keys():
  sizes = core.sequence("numbers", core.integer(1))
  rates = core.mapping("rates", core.number(0), core.choice(("a", "b")))
  assert sizes("sizes", [1, 2]) == (1, 2)
  assert rates("rates", {"a": 1}) == {"a": 1}
  wrong = None, 3, "text", {1: 2}
  said = "a list or tuple of numbers, got"
  refuse(TypeError, said, sizes, (*wrong, np.zeros(2)))
  refuse(TypeError, "a dict of rates, got", rates, (*wrong, [1]))
  for kind, value, place in (
    (sizes, [1, 0], r"`x\[1\]`"),
    (rates, {"c": 1}, r"`x\['c'\]`"),
    (rates, {"b": -1}, r"`x\['b'\]`"),
  ):
    with pytest.raises(ValueError, match=place):
      kind("x", value)


def test_a_declared_function_checks_and_converts_each_given_argument():
  @core.declare(sizes=core.sequence("integers"), bits=core.integer(1, 8))
  def encode(x, sizes, *rest, bits=0, **options):
    return x, sizes, rest, bits, options

  # Defaults are taken as they are.
  assert encode(1, [2]) == (1, (2,), (), 0, {})
  assert encode(1, [2], 3, bits=4, a=5) == (1, (2,), (3,), 4, {"a": 5})
  assert list(inspect.signature(encode).parameters)[:2] == ["x", "sizes"]
  for wrong in (
    lambda: encode(1, 2),
    lambda: encode(x=1, sizes=2),
    lambda: encode(1, [2], bits=9),
  ):
    with pytest.raises((TypeError, ValueError), match=r"`(sizes|bits)` must"):
      wrong()
  with pytest.raises(TypeError, match="missing 1 required .* 'sizes'"):
    encode(1)
  with pytest.raises(AssertionError, match="sise"):
    core.declare(sise=core.text)(len)


def test_a_declared_class_checks_its_fields_before_it_uses_them():
  @dataclasses.dataclass(frozen=True)
  @core.declare(sizes=core.sequence("integers"))
  class Base:
    sizes: tuple[int, ...]

  @dataclasses.dataclass(frozen=True)
  @core.declare(bits=core.integer(1))
  class Derived(Base):
    bits: int = 8

  @dataclasses.dataclass(frozen=True)
  @core.declare(sizes=core.sequence("integers", core.integer(1)))
  class Finished(Base):
    def __post_init__(self):
      object.__setattr__(self, "sizes", self.sizes[::-1])

  assert Derived([1, 2]).sizes == (1, 2)
  assert Finished([1, 2]).sizes == (2, 1)
  for wrong in (
    lambda: Derived(3),
    lambda: Derived([1], bits=0),
    lambda: dataclasses.replace(Derived([1]), bits=0),
    lambda: Finished([0]),
  ):
    with pytest.raises((TypeError, ValueError), match="must be"):
      wrong()


def test_arrays_and_shapes_are_spelled_as_jax_does():
  narrow = jax.ShapeDtypeStruct((0, 5), jnp.bfloat16)
  keys = jax.random.split(jax.random.key(0), 3)
  for x, text in (
    (jnp.float32(0), "float32[]"),
    (narrow, "bfloat16[0,5]"),
    (keys, "key<fry>[3]"),
  ):
    assert core.shape_string(x) == text


def test_only_arrays_of_jax_have_buffers():
  check = core.check_buffers
  x, y, z = jnp.ones(2), jnp.zeros(2), np.ones(2)
  check({"params": {"w": x}, "batch": [y, y]}, donated=("params",))
  check({"params": [z, z, 1.0, None]}, donated=("params",))
  jax.eval_shape(lambda a: check({"params": [a, a]}, ("params",)), z)
