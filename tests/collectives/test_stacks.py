"""Small arrays of one shape are reduced as one array, with the same bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmotion import codecs, collectives, make_key, wire
from jaxmotion.collectives import _methods
from jaxmotion.collectives._layout import ArrayPlan
from jaxmotion.collectives._methods import Reduction
from jaxmotion.collectives._states import ReduceState
from jaxmotion.hosts import Sending
from tests.collectives.helpers import mesh

RNG = np.random.default_rng(0)
SHAPE = (30, 9)
CODECS = {
  "int4_stochastic": codecs.uniform(bits=4, rounding="stochastic"),
  "sign_feedback": codecs.feedback(codecs.sign()),
  "topk_int8": codecs.chain(codecs.topk(density=0.1), codecs.uniform(bits=8)),
  "topk_global": codecs.feedback(codecs.topk(density=0.1), form="global"),
  "rotated": codecs.chain(codecs.rotate(), codecs.uniform(bits=4)),
  "random_k": codecs.random_k(density=0.2),
  "low_rank": codecs.low_rank(rank=2),
}
# These add values up, which no two programs do in the same order.
SUMS = ("sign_feedback", "rotated")


def make_tree(count):
  """Returns equal matrices of 4 workers, and one of another shape."""
  rows = RNG.normal(size=(count + 1, 4, *SHAPE)).astype(np.float32)
  tree = {f"w{i}": jnp.asarray(rows[i]) for i in range(count)}
  return {**tree, "wide": jnp.asarray(rows[-1].reshape(4, 10, 27))}


def make_program(codec, method):
  """Returns a function of gradients to means and states after two steps."""

  def local(tree):
    tree = jax.tree.map(lambda x: x[0], tree)
    key = make_key(0, lax.axis_index("data"))
    call = functools.partial(
      collectives.all_reduce, tree, "data", codec, method=method
    )
    state = collectives.all_reduce_init(tree, "data", codec, method=method)
    first, state = call(state=state, key=key)
    second, state = call(state=state, key=key.fold(1))
    return (first, second), jax.tree.map(lambda x: x[None], state)

  return jax.shard_map(
    local,
    mesh=mesh(4),
    in_specs=P("data"),
    out_specs=(P(), P("data")),
    check_vma=False,
  )


@pytest.mark.unoptimized
@pytest.mark.parametrize("method", ["gather", "two_phase"])
@pytest.mark.parametrize("name", CODECS)
def test_stacked_arrays_have_the_values_and_bytes_of_arrays_apart(
  name, method, monkeypatch
):
  tree, found = make_tree(3), []
  for limit in (0, _methods._MAX_SIZE):
    monkeypatch.setattr(_methods, "_MAX_SIZE", limit)
    program = jax.jit(make_program(CODECS[name], method))
    ledger = wire.step_bytes(program, tree)
    found.append((jax.device_get(program(tree)), ledger.total_bytes))
  (apart, apart_bytes), (stacked, stacked_bytes) = found
  for one, other in zip(
    jax.tree.leaves(stacked), jax.tree.leaves(apart), strict=True
  ):
    if name in SUMS and one.dtype == np.float32:
      np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6)
    else:
      np.testing.assert_array_equal(one, other)
  assert stacked_bytes == apart_bytes


@pytest.mark.parametrize("method", ["gather", "two_phase"])
@pytest.mark.parametrize("name", ["int4_stochastic", "sign_feedback"])
def test_a_program_grows_little_with_the_number_of_equal_arrays(name, method):
  def count_lines(count):
    program = jax.jit(make_program(CODECS[name], method))
    return program.lower(make_tree(count)).as_text().count("\n")

  few, many, different = count_lines(2), count_lines(12), count_lines(0)
  of_one = (few - different) / 2
  assert (many - few) / 10 < of_one / 4


def stack_positions(*codecs_and_sizes, method="gather", pieces=0):
  reductions = []
  for codec, size in codecs_and_sizes:
    x = jnp.zeros(size)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    plan = ArrayPlan(codec, like, method, 4, None, "mean")
    reductions.append(Reduction(plan, x, ReduceState((), ()), None))
  return _methods.find_stacks(reductions, Sending(pieces))


def test_arrays_of_other_codecs_or_shapes_stay_apart():
  int8, sign = codecs.uniform(bits=8), codecs.sign()
  equal = codecs.uniform(bits=8)
  given = ((int8, 64), (sign, 64), (int8, 65), (equal, 64), (int8, 64))
  assert stack_positions(*given) == [[0, 3, 4], [1], [2]]


def test_large_arrays_stay_apart():
  given = [(codecs.sign(), _methods._MAX_SIZE + 1)] * 2
  assert stack_positions(*given) == [[0], [1]]


@pytest.mark.parametrize("method", ["sum", "rounds"])
def test_sums_and_rounds_stay_apart(method):
  given = [(codecs.identity(), 64)] * 2
  assert stack_positions(*given, method=method) == [[0], [1]]


def test_arrays_that_are_sent_in_pieces_stay_apart():
  given = [(codecs.sign(), 64)] * 2
  assert stack_positions(*given, pieces=3) == [[0], [1]]


def test_empty_arrays_and_scalars_are_stacked_too():
  shapes = [(), (), (0, 3), (0, 3)]
  tree = {
    f"leaf{i}": jnp.full((4, *shape), i, jnp.float32)
    for i, shape in enumerate(shapes)
  }
  (mean, _), _ = jax.jit(make_program(codecs.sign(), None))(tree)
  for name, x in mean.items():
    np.testing.assert_array_equal(x, tree[name][0])
