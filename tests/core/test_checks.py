import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion.core import (
  check_arrays,
  check_bool,
  check_buffers,
  check_callable,
  check_choice,
  check_float,
  check_instance,
  check_int,
  check_like,
  check_mapping,
  check_number,
  check_sequence,
  check_text,
  shape_string,
)


@pytest.mark.parametrize("value", [1, 4, 8])
def test_integers_in_the_range_pass(value):
  check_int("bits", value, 1, 8)


@pytest.mark.parametrize("value", [0, 9, -1])
def test_integers_outside_the_range_are_named(value):
  with pytest.raises(ValueError, match=r"`bits` must be .* in \[1, 8\], got"):
    check_int("bits", value, 1, 8)


def test_a_range_may_be_open_above():
  check_int("block", 10**30, 1)
  with pytest.raises(ValueError, match="`block` must be an integer >= 1, got"):
    check_int("block", 0, 1)


@pytest.mark.parametrize("value", [True, np.True_, np.int32(4), 1.0, "1", None])
def test_what_is_no_integer_is_a_type_error(value):
  with pytest.raises(TypeError, match="`bits` must be an integer"):
    check_int("bits", value, 1, 8)


def test_arrays_of_injected_hyperparameters_are_explained():
  hint = r"an array, \w+\[\]: write a Python number. .*`static_args`"
  with pytest.raises(TypeError, match=f"`bits` must be an integer .* {hint}"):
    check_int("bits", jnp.int32(4), 1, 8)
  with pytest.raises(TypeError, match=f"`b1` must be a number .* {hint}"):
    jax.jit(lambda b1: check_number("b1", b1, 0, 1))(0.9)


@pytest.mark.parametrize("value", [1, 1.0, 1e-30])
def test_numbers_in_the_interval_pass(value):
  check_number("density", value, 0, 1, open_low=True)


@pytest.mark.parametrize("value", [0, -0.5, 1.0001, np.nan, np.inf])
def test_numbers_outside_the_interval_are_named(value):
  with pytest.raises(ValueError, match=r"`density` must be .* \(0, 1\], got"):
    check_number("density", value, 0, 1, open_low=True)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_must_be_finite(value):
  with pytest.raises(ValueError, match=r"must be a number in \(-inf, inf\), "):
    check_number("x", value)


@pytest.mark.parametrize("value", [True, "1", None, [0.5]])
def test_what_is_no_number_is_a_type_error(value):
  with pytest.raises(TypeError, match="`density` must be a number"):
    check_number("density", value, 0, 1)


def test_a_choice_is_one_of_the_choices():
  check_choice("method", None, (None, "gather"))
  with pytest.raises(ValueError, match="`method` must be one of None, 'gat"):
    check_choice("method", "ring", (None, "gather"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_floating_arrays_and_shapes_pass(dtype):
  check_float("x", jnp.zeros(2, dtype))
  check_float("x", jax.ShapeDtypeStruct((2,), dtype))


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64"])
def test_other_arrays_are_named_with_their_shape(dtype):
  with pytest.raises(TypeError, match=rf"`w/0` must be .*got {dtype}\[2,3\]"):
    check_float("w/0", jnp.zeros((2, 3), dtype))


def test_shapes_are_spelled_as_jax_does():
  assert shape_string(jnp.float32(0)) == "float32[]"
  assert (
    shape_string(jax.ShapeDtypeStruct((0, 5), jnp.bfloat16)) == "bfloat16[0,5]"
  )
  assert shape_string(jax.random.split(jax.random.key(0), 3)) == "key<fry>[3]"


@pytest.mark.parametrize("leaf", ["text", object(), dict, 10**30])
def test_leaves_that_are_no_arrays_are_named(leaf):
  with pytest.raises(
    TypeError, match="`x` must be a tree of arrays, got .*'a'"
  ):
    check_arrays("x", {"a": leaf})


def test_arrays_numbers_shapes_and_none_are_trees_of_arrays():
  like = jax.ShapeDtypeStruct((2,), "float32")
  check_arrays("x", [np.zeros(3), jnp.zeros(2), jax.random.key(0), 1.5, like])
  check_arrays("x", None)


def test_trees_are_compared_by_structure_and_shapes():
  like = {"a": jax.ShapeDtypeStruct((2,), "float32")}
  check_like("state", {"a": np.zeros(2)}, like, "`init`")
  with pytest.raises(ValueError, match=r"`state` .* got float32\[3\] at 'a'"):
    check_like("state", {"a": jnp.zeros(3)}, like, "`init`")
  with pytest.raises(ValueError, match="`state` .* got PyTreeDef"):
    check_like("state", [jnp.zeros(2)], like, "`init`")
  with pytest.raises(TypeError, match="`state` must be a tree of arrays"):
    check_like("state", {"a": "b"}, like, "`init`")


def test_what_is_no_function_is_named():
  check_callable("fn", len)
  with pytest.raises(TypeError, match="`fn` must be a function, got 3"):
    check_callable("fn", 3)


@pytest.mark.parametrize("value", [1, 0, None, np.True_, "True"])
def test_only_true_and_false_are_flags(value):
  check_bool("overlap", False)
  with pytest.raises(TypeError, match="`overlap` must be True or False, got"):
    check_bool("overlap", value)


def test_what_is_no_string_is_named():
  check_text("name", "")
  with pytest.raises(TypeError, match="`name` must be a string, got 3"):
    check_text("name", 3)


def test_objects_of_another_class_are_named():
  check_instance("key", None, (int, type(None)), "an int or None")
  with pytest.raises(TypeError, match="`key` must be an int or None, got 'a'"):
    check_instance("key", "a", (int, type(None)), "an int or None")


@pytest.mark.parametrize("value", [None, 3, "text", {1: 2}, np.zeros(2)])
def test_sequences_are_lists_and_tuples(value):
  assert check_sequence("sizes", [1, 2], "numbers") == (1, 2)
  with pytest.raises(TypeError, match="`sizes` must be a list or tuple of num"):
    check_sequence("sizes", value, "numbers")


@pytest.mark.parametrize("value", [None, 3, "text", [1], {1: 2}])
def test_mappings_have_strings_as_keys(value):
  assert check_mapping("rates", {"a": 1}, "dtypes to rates") == {"a": 1}
  with pytest.raises(TypeError, match="`rates` must be a dict of dtypes to"):
    check_mapping("rates", value, "dtypes to rates")


def test_arrays_of_their_own_pass():
  x, y = jnp.ones(2), jnp.zeros(2)
  check_buffers({"params": {"w": x}, "batch": [y, y]}, donated=("params",))


def test_what_has_no_buffer_passes():
  x = np.ones(2)
  check_buffers({"params": [x, x, 1.0, None]}, donated=("params",))
  jax.eval_shape(lambda a: check_buffers({"params": [a, a]}, ("params",)), x)


@pytest.mark.parametrize("donated", [(), ("params",)])
def test_a_donated_array_is_refused_by_its_path(donated):
  x = jnp.ones(2)
  jax.jit(lambda a: a + 1, donate_argnums=0)(x)
  with pytest.raises(ValueError, match="`params/w/0` must be .* still exists"):
    check_buffers({"params": {"w": [x]}}, donated)


@pytest.mark.parametrize(
  ("args", "message"),
  [
    (lambda x: {"params": [x, x]}, "`params/1` .* got the array of `params/0`"),
    (lambda x: {"params": x, "batch": x}, "`batch` .* array of `params`"),
    (lambda x: {"batch": x, "params": [x]}, "`params/0` .* array of `batch`"),
  ],
)
def test_an_array_that_is_donated_may_be_given_once(args, message):
  with pytest.raises(ValueError, match=message):
    check_buffers(args(jnp.ones(2)), donated=("params",))
