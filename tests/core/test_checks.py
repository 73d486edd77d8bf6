import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import core

NAN, INF = np.nan, np.inf


def refuse(error, said, check, values, *args, **options):
  """Checks that each value is refused by its name."""
  for value in values:
    with pytest.raises(error) as raised:
      check("x/0", value, *args, **options)
    assert type(raised.value) is error
    assert str(raised.value).startswith("`x/0` must be ")
    assert said in str(raised.value)


def test_integers_are_of_a_range_and_arrays_are_explained():
  check = core.check_int
  for value in (1, 4, 8):
    check("bits", value, 1, 8)
  check("block", 10**30, 1)
  refuse(ValueError, "an integer in [1, 8], got", check, (0, 9, -1), 1, 8)
  refuse(ValueError, "an integer >= 1, got 0", check, [0], 1)
  wrong = True, np.True_, np.int32(4), 1.0, "1", None
  refuse(TypeError, "an integer in [1, 8], got", check, wrong, 1, 8)
  hint = r"an array, \w+\[\]: write a Python number. .*`static_args`"
  with pytest.raises(TypeError, match=f"`bits` must be an integer .* {hint}"):
    core.check_int("bits", jnp.int32(4), 1, 8)
  with pytest.raises(TypeError, match=f"`b1` must be a number .* {hint}"):
    jax.jit(lambda b1: core.check_number("b1", b1, 0, 1))(0.9)


def test_numbers_are_finite_and_of_an_interval():
  check, half_open = core.check_number, dict(open_low=True)
  for value in (1, 1.0, 1e-30):
    check("density", value, 0, 1, **half_open)
  check("density", 0, 0, 1, open_high=True)
  outside = 0, -0.5, 1.0001, NAN, INF
  refuse(ValueError, "in (0, 1], got", check, outside, 0, 1, **half_open)
  refuse(ValueError, "in [0, 1), got 1", check, [1], 0, 1, open_high=True)
  refuse(ValueError, "a number in (-inf, inf), ", check, (NAN, INF, -INF))
  wrong = True, "1", None, [0.5]
  refuse(TypeError, "a number in [0, 1], got", check, wrong, 0, 1)


def test_floating_arrays_and_shapes_pass_and_are_spelled_as_jax_does():
  for dtype in ("float32", "bfloat16", "float8_e4m3fn"):
    core.check_float("x", jnp.zeros(2, dtype))
    core.check_float("x", jax.ShapeDtypeStruct((2,), dtype))
  for dtype in ("int32", "uint8", "bool", "complex64"):
    x = jnp.zeros((2, 3), dtype)
    refuse(TypeError, f"array, got {dtype}[2,3]", core.check_float, [x])
  refuse(TypeError, "array, got 1.5", core.check_float, [1.5])
  narrow = jax.ShapeDtypeStruct((0, 5), jnp.bfloat16)
  keys = jax.random.split(jax.random.key(0), 3)
  for x, text in (
    (jnp.float32(0), "float32[]"),
    (narrow, "bfloat16[0,5]"),
    (keys, "key<fry>[3]"),
  ):
    assert core.shape_string(x) == text


def test_trees_have_arrays_and_are_compared_by_structure_and_shapes():
  check = core.check_arrays
  like = jax.ShapeDtypeStruct((2,), "float32")
  check("x", [np.zeros(3), jnp.zeros(2), jax.random.key(0), 1.5, like, None])
  wrong = [{"a": leaf} for leaf in ("text", object(), dict, 10**30)]
  refuse(TypeError, " at 'a'.", check, wrong)
  refuse(TypeError, "got 1.5 at '0'", check, [[1.5]], numbers=False)
  check = core.check_like
  args = {"a": jax.ShapeDtypeStruct((2,), "float32")}, "`init`"
  check("state", {"a": np.zeros(2)}, *args)
  refuse(ValueError, "got float32[3] at", check, [{"a": jnp.ones(3)}], *args)
  refuse(ValueError, "that of `init`, got PyTree", check, [[np.ones(2)]], *args)
  refuse(TypeError, "a tree of arrays", check, [{"a": "b"}], *args)


def test_other_values_are_of_one_kind():
  core.check_choice("method", None, (None, "gather"))
  said = "one of None, 'gather', got 'ring'"
  refuse(ValueError, said, core.check_choice, ["ring"], (None, "gather"))
  refuse(ValueError, "one of 1, got True", core.check_choice, [True], (1,))
  core.check_callable("fn", len)
  refuse(TypeError, "a function, got 3", core.check_callable, [3])
  core.check_bool("overlap", False)
  flags = 1, 0, None, np.True_, "True"
  refuse(TypeError, "True or False, got", core.check_bool, flags)
  core.check_text("name", "")
  refuse(TypeError, "a string, got 3", core.check_text, [3])
  kinds = (int, type(None)), "an int or None"
  core.check_instance("key", None, *kinds)
  refuse(TypeError, f"{kinds[1]}, got 'a'", core.check_instance, ["a"], *kinds)


def test_sequences_are_lists_and_mappings_have_strings_as_keys():
  sequence, mapping = core.check_sequence, core.check_mapping
  assert sequence("sizes", [1, 2], "numbers") == (1, 2)
  assert mapping("rates", {"a": 1}, "rates") == {"a": 1}
  wrong = None, 3, "text", {1: 2}
  said = "a list or tuple of numbers, got"
  refuse(TypeError, said, sequence, (*wrong, np.zeros(2)), "numbers")
  refuse(TypeError, "a dict of rates, got", mapping, (*wrong, [1]), "rates")


def test_only_arrays_of_jax_have_buffers():
  check = core.check_buffers
  x, y, z = jnp.ones(2), jnp.zeros(2), np.ones(2)
  check({"params": {"w": x}, "batch": [y, y]}, donated=("params",))
  check({"params": [z, z, 1.0, None]}, donated=("params",))
  jax.eval_shape(lambda a: check({"params": [a, a]}, ("params",)), z)


def test_a_donated_array_is_refused_and_one_to_donate_may_be_given_once():
  x, gone = jnp.ones(2), jnp.ones(2)
  jax.jit(lambda a: a + 1, donate_argnums=0)(gone)
  for donated in ((), ("params",)):
    with pytest.raises(ValueError, match="`params/w/0` must be .* still exist"):
      core.check_buffers({"params": {"w": [gone]}}, donated)
  for args, said in (
    ({"params": [x, x]}, "`params/1` .* got the array of `params/0`"),
    ({"params": x, "batch": x}, "`batch` .* array of `params`"),
    ({"batch": x, "params": [x]}, "`params/0` .* array of `batch`"),
  ):
    with pytest.raises(ValueError, match=said):
      core.check_buffers(args, donated=("params",))
