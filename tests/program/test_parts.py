"""Programs of whole arrays, evaluated on parts: equal values, own gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmotion import program
from tests.paths import ROOT

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


# What the page says of operations -> the collectives of JAX that they become.
SENT = {
  "nothing": set(),
  "a sum of results": {"psum"},
  "a result of each worker": {"all_gather"},
  "one side of the product": {"all_gather"},
  "the operand": {"all_gather"},
  "what is inside of them sends": set(),
}
NOTHING, SUM, EACH, SIDE, WHOLE, INSIDE = SENT
# name -> (function of a parameter and the batch, what it sends).
CASES = {
  "attention": (attend, NOTHING),
  "argmax": (lambda w, x: jnp.argmax(x @ w, -1), NOTHING),
  "batch norm": (lambda w, x: (x @ w - x.mean((0, 1))) / x.std((0, 1)), SUM),
  "bias": (lambda w, x: x + w[0], NOTHING),
  "branch": (choose, SUM),
  "broadcast": (lambda w, x: jnp.ones((8, 1)) * w[0], NOTHING),
  "checkpoint": (
    lambda w, x: jax.checkpoint(lambda w: jnp.sin(x @ w))(w),
    INSIDE,
  ),
  "concatenate": (
    lambda w, x: jnp.concatenate([x, jnp.tanh(x * w[0])], 1),
    NOTHING,
  ),
  "contrast": (lambda w, x: (x[:, 0] @ w) @ x[:, 1].T, SIDE),
  "convolution": (lambda w, x: conv(K * w[0, 0], x), NOTHING),
  "cumsum": (lambda w, x: jnp.cumsum(x * w[0], 1), NOTHING),
  "cumsum over the batch": (lambda w, x: jnp.cumsum(x * w[0], 0), WHOLE),
  "custom jvp": (lambda w, x: doubled_slope(x * w[0]), INSIDE),
  "custom vjp": (lambda w, x: round_through(x * w[1], w[0]), INSIDE),
  "dropout": (
    lambda w, x: jnp.where(
      jax.random.bernoulli(KEY, 0.5, x.shape), x * w[0], 0
    ),
    NOTHING,
  ),
  "dropout of a dimension": (
    lambda w, x: x * jax.random.bernoulli(KEY, 0.5, (8, 1, 6)) * w[0],
    NOTHING,
  ),
  "noise on parameters": (
    lambda w, x: x @ (w + jax.random.normal(KEY, w.shape)),
    NOTHING,
  ),
  "embedding": (
    lambda w, x: w[IDS[:, :1] + 0 * x[:, :1, 0].astype(int)],
    NOTHING,
  ),
  "einsum": (lambda w, x: jnp.einsum("btd,de->ebt", x, w), NOTHING),
  "flip": (lambda w, x: (x * w[0])[:, ::-1], NOTHING),
  "layer norm": (lambda w, x: w[0] * (x - x.mean(-1, keepdims=True)), NOTHING),
  "loop": (halve, SUM),
  "maximum": (lambda w, x: jnp.max(x * w[0], 0), EACH),
  "merged dimensions": (lambda w, x: (x @ w).reshape(32, 6) ** 2, NOTHING),
  "mean": (lambda w, x: jnp.mean(x * w[0]), SUM),
  "norm of parameters": (lambda w, x: jnp.sum(w**2) + 0 * x[:, 0, 0], NOTHING),
  "one label each": (
    lambda w, x: jnp.take_along_axis(
      x @ w, IDS[..., None] + 0 * x[..., :1].astype(int), -1
    ),
    NOTHING,
  ),
  "pad": (lambda w, x: jnp.pad(x * w[0], ((0, 0), (1, 1), (0, 0))), NOTHING),
  "pool": (
    lambda w, x: lax.reduce_window(
      x * w[0], -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID"
    ),
    NOTHING,
  ),
  "prefix of the batch": (lambda w, x: (x * w[0])[:3], WHOLE),
  "rows set": (lambda w, x: (x * w[0]).at[:, 1].set(w[1]), NOTHING),
  "recurrence": (recur, SUM),
  "slice set": (
    lambda w, x: lax.dynamic_update_slice(x, x[:, :1] * w[0], (0, 1, 0)),
    NOTHING,
  ),
  "softmax": (lambda w, x: jax.nn.log_softmax(x @ w), NOTHING),
  "sort": (lambda w, x: jnp.sort(x * w[0], 1), NOTHING),
  "sort over the batch": (lambda w, x: jnp.sort(x * w[0], 0), WHOLE),
  "tied": (lambda w, x: jnp.tanh(x @ w) @ w.T, NOTHING),
  "transposed": (lambda w, x: jnp.swapaxes(x, 0, 2) * w[0, 0], NOTHING),
  "variance": (lambda w, x: jnp.var(x @ w), SUM),
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


def evaluate(fun, w, x):
  """What a worker holds of the results, from its part of the batch."""
  mesh = jax.sharding.get_abstract_mesh()
  workers = program.Workers("data", COUNT, mesh, frozenset([8]))
  batch = jax.ShapeDtypeStruct((COUNT * x.shape[0], *x.shape[1:]), x.dtype)
  closed = jax.make_jaxpr(fun)(w, batch)
  parts = [program.Part(w), program.Part(x, 0)]
  return workers, workers.settle(program.evaluate_parts(closed, parts, workers))


def on_parts(fun, w, x):
  """The value of a loss, and each worker's gradients, (workers, ...)."""

  def run(w, x):
    def loss(w):
      workers, (out,) = evaluate(fun, w, x)
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
def test_an_operation_sends_what_the_page_says(name):
  fun, sent = CASES[name]
  with jax.set_mesh(MESH):
    run = lambda w, x: [p.array[None] for p in evaluate(fun, w, x)[1]]
    specs = dict(in_specs=(P(), P("data")), out_specs=P("data"))
    mapped = jax.shard_map(run, mesh=MESH, check_vma=False, **specs)
    text = str(jax.make_jaxpr(mapped)(W, X))
  collectives = re.findall(r"\b(psum|all_gather|all_to_all)\[", text)
  assert set(collectives) == SENT[sent]


def test_the_page_has_a_row_for_all_that_is_sent():
  page = (ROOT / "docs" / "adapters.md").read_text()
  table = page.partition("| operation | what is sent |\n|---|---|\n")[2]
  rows = table.partition("\n\n")[0].splitlines()
  assert {row.split(" | ")[1].rstrip(" |") for row in rows} == set(SENT)
  assert {sent for _, sent in CASES.values()} == set(SENT)


def test_workers_draw_the_random_bits_of_their_rows():
  draw_bits = lambda _, x: jax.random.bits(KEY, x.shape, "uint32")

  def run(w, x):
    (part,) = evaluate(draw_bits, w, x)[1]
    assert part.dim == 0 and part.array.shape == (2, 4, 6)
    return part.array

  with jax.set_mesh(MESH):
    mapped = jax.jit(
      jax.shard_map(
        run,
        mesh=MESH,
        check_vma=False,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
      )
    )
    np.testing.assert_array_equal(mapped(W, X), draw_bits(W, X))
    # None are drawn for the whole batch and then cut.
    assert "random_bits" not in str(jax.make_jaxpr(mapped)(W, X))


def test_workers_gradients_differ(results):
  _, grads = results["mean"][0]
  assert len(np.unique(np.asarray(grads)[:, 0, 0])) == COUNT
