import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxmotion.core import _compat
from jaxmotion.hosts import update_in_place

X = np.random.default_rng(0).normal(size=(64, 512)).astype(np.float32)


def add(x, target, spent, count):
  return update_in_place(lambda v, s: x + v * s["scale"], target, spent, count)


@pytest.mark.parametrize("count", [0, 1, 2**31 - 1])
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_the_result_is_that_of_one_call_whatever_the_count(wrap, count):
  spent = {"scale": jnp.float32(2)}
  y = wrap(add)(X, jnp.ones_like(X), spent, jnp.int32(count))
  np.testing.assert_array_equal(y, X + 2)


def test_it_can_be_vmapped():
  scale = jnp.arange(3.0)
  y = jax.vmap(add)(
    jnp.zeros((3, 2)), jnp.ones((3, 2)), {"scale": scale}, jnp.arange(3)
  )
  np.testing.assert_array_equal(y, scale[:, None] * jnp.ones((3, 2)))


def test_trees_are_updated_too():
  a, b = update_in_place(
    lambda t, _: (t[0] + t[1], t[0] - t[1]),
    (jnp.float32(3), jnp.float32(1)),
    (),
    jnp.int32(0),
  )
  assert (a, b) == (4, 2)


def test_an_expression_that_several_read_is_computed_once_and_in_place():
  # A donated array, a cheap update of it, and three readers of the update.
  # XLA:CPU alone computes the update three times, so it copies the array first.
  def temp_bytes(update):
    def step(target, x, scale, count):
      v = update(x, target[0], {"scale": scale}, count)
      return v[None], (v.reshape(8, -1) > 0), jnp.where(v > 1, v, 0)[:, :8]

    shapes = [
      jax.ShapeDtypeStruct(shape, dtype)
      for shape, dtype in (
        ((1, *X.shape), X.dtype),
        (X.shape, X.dtype),
        ((), jnp.float32),
        ((), jnp.int32),
      )
    ]
    compiled = jax.jit(step, donate_argnums=0).lower(*shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temp_bytes(add) < X.nbytes / 8
  assert temp_bytes(lambda x, v, s, _: x + v * s["scale"]) >= X.nbytes


def trace_on(platform):
  """Returns how often a function is traced in a program of such devices."""
  traced = []
  device = AbstractDevice(platform, None, platform)
  mesh = AbstractMesh((1,), ("x",), abstract_device=device)

  def double(x, spent):
    traced.append(spent)
    return 2 * x

  with jax.sharding.use_abstract_mesh(mesh):
    text = str(
      jax.make_jaxpr(lambda x, n: update_in_place(double, x, (), n))(X, 1)
    )
  return len(traced), "while" in text, "cond[" in text


def test_where_the_platform_is_known_its_function_alone_is_traced(monkeypatch):
  assert trace_on("cpu") == (1, True, False)
  assert trace_on("tpu") == (1, False, False)
  monkeypatch.setattr(_compat, "_own_platforms", lambda: {"cpu", "tpu"})
  both = jax.make_jaxpr(
    lambda x, n: update_in_place(lambda x, _: 2 * x, x, (), n)
  )
  assert "cond[" in str(both(X, 1))
