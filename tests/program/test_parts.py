"""Programs of whole arrays, evaluated on parts: equal values, own gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmotion import program

COUNT = 4
MESH = jax.sharding.Mesh(np.array(jax.devices()[:COUNT]), ("data",))
RNG = np.random.default_rng(0)


def draw(*shape):
  return jnp.asarray(RNG.normal(size=shape), jnp.float32)


W, K, X = draw(6, 6), draw(3, 6, 5), draw(8, 4, 6)
IDS = jnp.asarray(RNG.integers(0, 6, (8, 4)))
KEY = jax.random.key(0)


@jax.custom_jvp
def doubled_slope(x):
  return jnp.sin(x)


doubled_slope.defjvps(lambda t, ans, x: 2 * t * jnp.cos(x))


@jax.custom_vjp
def round_through(x, scale):
  return jnp.round(x * scale) / scale


round_through.defvjp(
  lambda x, s: (round_through(x, s), (x, s)),
  lambda saved, g: (g, jnp.sum(g * saved[0]) * jnp.ones_like(saved[1])),
)


def conv(w, x):
  names = ("NWC", "WIO", "NWC")
  return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=names)


def recur(w, x):
  start = jnp.zeros((8, 6))
  step = lambda c, x: (jnp.tanh(c @ w + x), c.sum())
  return lax.scan(step, start, jnp.swapaxes(x, 0, 1))


def halve(w, x):
  go = lambda c: jnp.sum(c[1] ** 2) > 1
  step = lambda c: (c[0] + 1, c[1] / 2)
  return lax.while_loop(go, step, (0, lax.stop_gradient(x @ w)))


def choose(w, x):
  return lax.cond(
    x.sum() > 0, lambda x: x @ w, lambda x: jnp.zeros((8, 4, 6)), x
  )


def attend(w, x):
  q = (x @ w)[:, :, None]
  return jax.nn.dot_product_attention(q, q, x[:, :, None], is_causal=True)


# name -> (function of a parameter and the batch, whether parts are enough).
CASES = {
  "attention": (attend, True),
  "argmax": (lambda w, x: jnp.argmax(x @ w, -1), True),
  "batch norm": (lambda w, x: (x @ w - x.mean((0, 1))) / x.std((0, 1)), True),
  "bias": (lambda w, x: x + w[0], True),
  "branch": (choose, True),
  "broadcast": (lambda w, x: jnp.ones((8, 1)) * w[0], True),
  "checkpoint": (
    lambda w, x: jax.checkpoint(lambda w: jnp.sin(x @ w))(w),
    True,
  ),
  "concatenate": (
    lambda w, x: jnp.concatenate([x, jnp.tanh(x * w[0])], 1),
    True,
  ),
  "contrast": (lambda w, x: (x[:, 0] @ w) @ x[:, 1].T, False),
  "convolution": (lambda w, x: conv(K * w[0, 0], x), True),
  "cumsum": (lambda w, x: jnp.cumsum(x * w[0], 1), True),
  "cumsum over the batch": (lambda w, x: jnp.cumsum(x * w[0], 0), False),
  "custom jvp": (lambda w, x: doubled_slope(x * w[0]), True),
  "custom vjp": (lambda w, x: round_through(x * w[1], w[0]), True),
  "dropout": (
    lambda w, x: jnp.where(
      jax.random.bernoulli(KEY, 0.5, x.shape), x * w[0], 0
    ),
    True,
  ),
  "embedding": (lambda w, x: w[IDS[:, :1] + 0 * x[:, :1, 0].astype(int)], True),
  "einsum": (lambda w, x: jnp.einsum("btd,de->ebt", x, w), True),
  "flip": (lambda w, x: (x * w[0])[:, ::-1], True),
  "layer norm": (lambda w, x: w[0] * (x - x.mean(-1, keepdims=True)), True),
  "loop": (halve, True),
  "maximum": (lambda w, x: jnp.max(x * w[0], 0), False),
  "merged dimensions": (lambda w, x: (x @ w).reshape(32, 6) ** 2, True),
  "mean": (lambda w, x: jnp.mean(x * w[0]), True),
  "norm of parameters": (lambda w, x: jnp.sum(w**2) + 0 * x[:, 0, 0], True),
  "one label each": (
    lambda w, x: jnp.take_along_axis(
      x @ w, IDS[..., None] + 0 * x[..., :1].astype(int), -1
    ),
    True,
  ),
  "pad": (lambda w, x: jnp.pad(x * w[0], ((0, 0), (1, 1), (0, 0))), True),
  "pool": (
    lambda w, x: lax.reduce_window(
      x * w[0], -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID"
    ),
    True,
  ),
  "prefix of the batch": (lambda w, x: (x * w[0])[:3], False),
  "rows set": (lambda w, x: (x * w[0]).at[:, 1].set(w[1]), True),
  "recurrence": (recur, True),
  "slice set": (
    lambda w, x: lax.dynamic_update_slice(x, x[:, :1] * w[0], (0, 1, 0)),
    True,
  ),
  "softmax": (lambda w, x: jax.nn.log_softmax(x @ w), True),
  "sort": (lambda w, x: jnp.sort(x * w[0], 1), True),
  "sort over the batch": (lambda w, x: jnp.sort(x * w[0], 0), False),
  "tied": (lambda w, x: jnp.tanh(x @ w) @ w.T, True),
  "transposed": (lambda w, x: jnp.swapaxes(x, 0, 2) * w[0, 0], True),
  "variance": (lambda w, x: jnp.var(x @ w), True),
}


def scalar(fun):
  """A loss that has all of a function's results in it, none alike."""

  def loss(w, x):
    out = fun(w, x)
    leaves = [a.astype(jnp.float32) for a in jax.tree.leaves(out)]
    return sum(
      jnp.sum(a * jnp.cos(jnp.arange(a.size).reshape(a.shape))) for a in leaves
    )

  return loss


def on_parts(fun, w, x):
  """The value of a loss, and each worker's gradients, (workers, ...)."""
  workers = program.Workers("data", COUNT, jax.sharding.get_abstract_mesh())
  closed = jax.make_jaxpr(fun)(w, x)

  def run(w, x):
    def loss(w):
      parts = [program.Part(w), program.Part(x, 0)]
      (out,) = program.evaluate_parts(closed, parts, workers)
      return workers.whole(out)

    value, g = jax.value_and_grad(loss)(w)
    return value, g[None]

  specs = dict(in_specs=(P(), P("data")), out_specs=(P(), P("data")))
  return jax.shard_map(run, mesh=MESH, check_vma=False, **specs)(w, x)


@pytest.fixture(autouse=True, scope="module")
def as_other_people_write():
  with jax.numpy_rank_promotion("allow"):
    yield


@pytest.fixture(scope="module")
def results():
  """Of every case: on parts, and whole; a few cases in one program."""

  def run(names, w, x):
    losses = {name: scalar(CASES[name][0]) for name in names}
    return {
      name: (on_parts(loss, w, x), jax.value_and_grad(loss)(w, x))
      for name, loss in losses.items()
    }

  # XLA:CPU mixes up the sums of a larger program that comes from a cache.
  found = {}
  with jax.set_mesh(MESH):
    for i in range(0, len(CASES), 8):
      names = list(CASES)[i : i + 8]
      found |= jax.jit(functools.partial(run, names))(W, X)
  return found


@pytest.mark.parametrize("name", CASES)
def test_values_are_equal_and_gradients_are_own(results, name):
  (value, grads), (wanted, whole) = results[name]
  np.testing.assert_allclose(value, wanted, rtol=2e-5, atol=1e-5)
  scale = float(jnp.max(jnp.abs(whole)))
  np.testing.assert_allclose(grads.mean(0), whole, atol=3e-6 * max(scale, 1))


@pytest.mark.parametrize("name", CASES)
def test_batches_are_gathered_only_where_parts_are_not_enough(name):
  fun, is_enough = CASES[name]
  # Without the sum over all results, which is over a part of each.
  loss = lambda w, x: sum(
    jnp.sum(a.astype(jnp.float32)) for a in jax.tree.leaves(fun(w, x))
  )
  with jax.set_mesh(MESH):
    jaxpr = jax.make_jaxpr(lambda w, x: on_parts(loss, w, x))(W, X)
  assert ("all_gather" in str(jaxpr)) != is_enough


def test_workers_gradients_differ(results):
  _, grads = results["mean"][0]
  assert len(np.unique(np.asarray(grads)[:, 0, 0])) == COUNT
