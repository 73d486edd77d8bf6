"""Rows of arrays, and small arrays of one shape that are reduced as one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmotion import codecs, collectives, make_key, wire
from jaxmotion.codecs.extend import partition
from jaxmotion.collectives import _all_reduce, _layout, _states
from jaxmotion.collectives._layout import ArrayPlan
from tests.meshes import mesh_of

RNG = np.random.default_rng(0)
SHAPE = (30, 9)
CODECS = {
  "int4_stochastic": codecs.uniform(bits=4, rounding="stochastic"),
  "sign_feedback": codecs.feedback(codecs.sign()),
  "topk_global": codecs.feedback(codecs.topk(density=0.1), form="global"),
  "rotated": codecs.chain(codecs.rotate(), codecs.uniform(bits=4)),
  "int8": codecs.uniform(bits=8),
  "int4_feedback": codecs.feedback(codecs.uniform(bits=4)),
  "topk_feedback": codecs.feedback(codecs.topk(density=0.05)),
}
# These add values up, which no two programs do in the same order.
SUMS = ("sign_feedback", "rotated")


def make_tree(count):
  """Returns equal matrices of 4 workers, and one of another shape."""
  rows = RNG.normal(size=(count + 1, 4, *SHAPE)).astype(np.float32)
  tree = {f"w{i}": jnp.asarray(rows[i]) for i in range(count)}
  return {**tree, "wide": jnp.asarray(rows[-1].reshape(4, 10, 27))}


def fill(a, i):
  """Returns a part of a state as after some steps, each another."""
  if not jnp.issubdtype(a.dtype, jnp.floating):
    return a
  return a + jnp.sin((i + 1.0) * jnp.arange(a.size).reshape(a.shape))


def make_program(codec, method):
  """Returns a function of gradients to means and the state after them."""

  def local(tree):
    tree = jax.tree.map(lambda x: x[0], tree)
    key = make_key(0, lax.axis_index("data"))
    plans = _layout.plan_arrays(partition(codec, tree), 4, method)
    state = list(map(_states.init_state, plans))
    leaves, structure = jax.tree.flatten(state)
    state = jax.tree.unflatten(structure, map(fill, leaves, range(len(leaves))))
    if leaves:
      state = _states.stack_states(plans, state)
    mean, state = collectives.all_reduce(
      tree, "data", codec, state=state, key=key, method=method
    )
    if leaves:
      state = _states.unstack_states(plans, state)
    return mean, jax.tree.map(lambda x: x[None], state)

  return jax.shard_map(
    local,
    mesh=mesh_of(4),
    in_specs=P("data"),
    out_specs=(P(), P("data")),
    check_vma=False,
  )


@pytest.mark.parametrize(
  ("name", "method"),
  [
    ("int4_stochastic", "two_phase"),
    ("sign_feedback", "two_phase"),
    ("topk_global", "two_phase"),
    ("rotated", "gather"),
  ],
)
def test_stacked_arrays_have_the_values_and_bytes_of_arrays_apart(
  name, method, monkeypatch
):
  limit = "_MAX_STACKED_ELEMENTS"
  check_limit(limit, CODECS[name], method, make_tree(2), monkeypatch)


def check_limit(limit, codec, method, tree, monkeypatch):
  """Checks that values and bytes are those of a program without joins."""
  found = []
  for most in (0, getattr(_layout, limit)):
    monkeypatch.setattr(_layout, limit, most)
    _all_reduce._plan_tree.cache_clear()
    program = jax.jit(make_program(codec, method))
    ledger = wire.step_bytes(program, tree)
    found.append((jax.device_get(program(tree)), ledger.total_bytes))
  (apart, apart_bytes), (joined, joined_bytes) = found
  for one, other in zip(
    jax.tree.leaves(joined), jax.tree.leaves(apart), strict=True
  ):
    is_sum = codec in [CODECS[name] for name in SUMS]
    if is_sum and one.dtype == np.float32:
      np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6)
    else:
      np.testing.assert_array_equal(one, other)
  assert joined_bytes == apart_bytes


@pytest.mark.parametrize(
  "name", ["int8", "int4_feedback", "sign_feedback", "topk_feedback"]
)
def test_means_encoded_together_have_the_values_and_bytes_of_means_apart(
  name, monkeypatch
):
  shapes = (4, 256, 512), (4, 128, 512), (4, 128, 512), (4, 512, 256)
  tree = make_tree(2) | {
    f"x{i}": jnp.asarray(RNG.normal(size=shape).astype(np.float32))
    for i, shape in enumerate(shapes)
  }
  check_limit(
    "_MAX_BUNDLE_ELEMENTS", CODECS[name], "two_phase", tree, monkeypatch
  )
  own = jax.tree.map(lambda x: x[0], tree)
  arrays = partition(CODECS[name], own)
  plans = _layout.plan_arrays(arrays, 4, "two_phase")
  bundles = _layout.find_bundles(plans)
  assert len(bundles) < len(_layout.find_stacks(plans)) < len(plans)


def test_a_program_grows_little_with_the_number_of_equal_arrays():
  def count_lines(count):
    program = jax.jit(make_program(CODECS["int4_stochastic"], "two_phase"))
    return program.lower(make_tree(count)).as_text().count("\n")

  few, many, different = count_lines(2), count_lines(6), count_lines(0)
  of_one = (few - different) / 2
  assert (many - few) / 4 < of_one / 4


def stack_positions(*codecs_and_sizes, method="gather"):
  plans = [
    ArrayPlan(
      codec, jax.ShapeDtypeStruct((size,), jnp.float32), method, 4, None, "mean"
    )
    for codec, size in codecs_and_sizes
  ]
  return _layout.find_stacks(plans)


def test_arrays_that_differ_or_are_not_small_stay_apart():
  int8, sign = codecs.uniform(bits=8), codecs.sign()
  equal = codecs.uniform(bits=8)
  given = ((int8, 64), (sign, 64), (int8, 65), (equal, 64), (int8, 64))
  assert stack_positions(*given) == [[0, 3, 4], [1], [2]]
  alike, apart = [(sign, 64)] * 2, [[0], [1]]
  assert stack_positions(*alike) == [[0, 1]]
  large = _layout._MAX_STACKED_ELEMENTS
  assert stack_positions(*[(sign, large + 1)] * 2) == apart
  for method in ("sum", "rounds"):
    assert stack_positions(*alike, method=method) == apart


def test_a_stack_is_no_larger_than_its_limit(monkeypatch):
  monkeypatch.setattr(_layout, "_MAX_STACK_ELEMENTS", 200)
  sign = codecs.sign()
  given = ((sign, 64), (sign, 300), *[(sign, 64)] * 4)
  assert stack_positions(*given) == [[0, 2, 3], [1], [4, 5]]


def test_empty_arrays_and_scalars_are_stacked_too():
  shapes = [(), (), (0, 3), (0, 3)]
  tree = {
    f"leaf{i}": jnp.full((4, *shape), i, jnp.float32)
    for i, shape in enumerate(shapes)
  }
  mean, _ = jax.jit(make_program(codecs.sign(), None))(tree)
  for name, x in mean.items():
    np.testing.assert_array_equal(x, tree[name][0])


ROW_CODECS = {
  "int8": codecs.uniform(bits=8),
  "stochastic": codecs.uniform(bits=4, rounding="stochastic"),
  "sign": codecs.sign(),
  "bfloat16": codecs.cast("bfloat16"),
  "memory": codecs.feedback(codecs.uniform(bits=4)),
}


@pytest.mark.parametrize(
  ("name", "shape", "workers"),
  # Rows that workers divide and do not, a vector, and more rows of padding
  # than one worker has.
  [
    ("stochastic", (512, 256), 4),
    ("stochastic", (512, 256), 3),
    ("stochastic", (300, 257), 64),
    ("int8", (131_101,), 4),
    ("sign", (512, 256), 3),
    ("bfloat16", (131_101,), 4),
    ("memory", (512, 256), 3),
  ],
)
def test_shards_have_the_bits_of_padded_rows(name, shape, workers):
  codec = ROW_CODECS[name]
  key = make_key(3) if codec.needs_key else None
  x = np.random.default_rng(1).normal(size=shape).astype(np.float32)

  @jax.jit
  def encode(x):
    rows = _layout.pad_to_rows(x, workers)
    state = jax.vmap(codec.init)(rows)
    padded = _layout.encode_rows(codec, rows, state, key)
    return _layout.encode_shards(codec, x, workers, state, key), padded

  jax.tree.map(np.testing.assert_array_equal, *encode(x))
