"""Bytes counted from a traced function."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from jaxmotion.wire import Move, step_bytes
from tests.wire.test_compiled import (
  PAYLOAD,
  gather,
  gather_bytes,
  looped,
  scanned,
  switched,
)

# Tracing needs no devices, so a mesh of any shape will do.
LINE = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
WORDS = jax.ShapeDtypeStruct((8, 8), "uint32")


def on(mesh, body):
  """`body` on every worker of `mesh`, all of them with the same input."""
  specs = dict(in_specs=P(), out_specs=P())
  return jax.shard_map(body, mesh=mesh, **specs, check_vma=False)


def count(body, x=WORDS, mesh=LINE, **choices):
  return step_bytes(on(mesh, body), x, **choices)


def test_invariant_collectives_of_checked_programs_are_counted():
  def body(x):
    total = lax.psum(x, "data")
    return total, lax.all_gather(x, "data", to="invarying")

  checked = jax.shard_map(body, mesh=LINE, in_specs=P("data"), out_specs=P())
  ledger = step_bytes(checked, jax.ShapeDtypeStruct((32, 8), "uint32"))
  assert ledger.select(op="all_reduce").total_bytes == 1.5 * PAYLOAD
  assert ledger.select(op="all_gather").total_bytes == 3 * PAYLOAD


def test_jitted_and_plain_functions_and_arrays_count_the_same():
  plain = on(LINE, gather)
  expected = step_bytes(plain, WORDS)
  assert expected.total_bytes == 3 * PAYLOAD
  assert step_bytes(jax.jit(plain), WORDS) == expected
  assert step_bytes(plain, jnp.zeros((8, 8), jnp.uint32)) == expected


def test_marking_as_varying_and_worker_numbers_move_nothing():
  def body(x):
    x = lax.pcast(2 * x, "data", to="varying")
    return x + lax.axis_index("data").astype(x.dtype)

  varying = jax.shard_map(body, mesh=LINE, in_specs=P(), out_specs=P("data"))
  assert step_bytes(varying, WORDS).moves == ()
  assert step_bytes(lambda x: 2 * x, WORDS).moves == ()


def test_groups_of_one_and_permutations_to_oneself_send_nothing():
  def body(x):
    return lax.while_loop(lambda c: c.sum() < 9, gather, lax.psum(x, "data"))

  alone = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,))
  assert count(body, mesh=alone).total_bytes == 0
  still = [(i, i) for i in range(4)]
  assert count(lambda x: lax.ppermute(x, "data", still)).total_bytes == 0


def test_narrow_elements_are_counted_by_bits_and_keys_by_words():
  odd = jax.ShapeDtypeStruct((5,), "uint32")
  ledger = count(lambda x: gather(x.astype(jnp.int4)), odd)
  assert ledger.moves[0].payload_bytes == 3  # 20 bits, rounded up.
  key = jax.eval_shape(lambda: jax.random.key(0))
  size = jax.eval_shape(jax.random.key_data, key).size
  ledger = count(lambda k: lax.all_gather(k, "data"), key)
  assert ledger.moves[0].payload_bytes == 4 * size


def test_nested_calls_are_followed():
  @jax.custom_vjp
  def custom(x):
    return gather(x)

  custom.defvjp(lambda x: (gather(x), None), lambda _, g: (g,))

  @jax.custom_jvp
  def tangent(x):
    return gather(x)

  tangent.defjvps(lambda t, out, x: t)

  def body(x):
    for wrap in (jax.jit, jax.checkpoint, lambda f: f):
      x = wrap(gather)(x)
    return tangent(custom(x))

  floats = jax.ShapeDtypeStruct((8, 8), "float32")
  assert count(body, floats).total_bytes == 5 * 3 * PAYLOAD


def test_mapped_programs_are_followed():
  workers = jax.device_count()
  body = jax.pmap(lambda x: lax.psum(x, "i"), axis_name="i")
  ledger = step_bytes(body, jax.ShapeDtypeStruct((workers, 3), "float32"))
  assert ledger.moves == (
    Move("all_reduce", ("i",), workers, "float32", 12, 1),
  )


def test_vmap_multiplies_the_payload_and_its_own_axis_moves_nothing():
  batched = jax.vmap(lambda x: lax.psum(x, "data"))
  assert count(batched).total_bytes == 1.5 * PAYLOAD
  own = jax.vmap(lambda x: lax.psum(x, "lane"), axis_name="lane")
  assert step_bytes(own, WORDS).moves == ()
  both = jax.vmap(lambda x: lax.psum(x, ("lane", "data")), axis_name="lane")
  assert count(both).total_bytes == 1.5 * PAYLOAD / 8


def test_loops_of_known_length_multiply():
  nested = lambda x: lax.fori_loop(0, 5, lambda _, c: scanned(c), x)
  assert count(nested).moves[0].count == 15


def test_a_loop_of_unknown_length_must_be_given_one():
  with pytest.raises(ValueError, match=r"`while_trips`.*gather"):
    count(looped)
  ledger = count(looped, while_trips=6)
  assert ledger.select(op="all_gather").moves[0].count == 6
  # The condition is also tested on the way out.
  assert ledger.select(op="all_reduce").moves[0].count == 7

  def quiet(x):
    x = lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c + 1, x)
    return gather(x)

  assert count(quiet).total_bytes == 3 * PAYLOAD


def test_a_branch_out_of_range_is_an_error_only_where_bytes_move():
  with pytest.raises(ValueError, match=r"`branch` must be less than 3.*got 3"):
    count(switched, branch=3)

  def quiet(x):
    return gather(lax.cond(x[0, 0] > 0, lambda: x, lambda: x + 1))

  assert count(quiet, branch=3).total_bytes == 3 * PAYLOAD


@pytest.mark.parametrize(("kept", "gathers"), [(0, 1), (1, 2), (2, 1)])
def test_a_scan_is_counted_for_the_outputs_in_use(kept, gathers):
  def step(c, _):
    return gather(c), (gather(c + 1), c + 2)

  def body(x):
    last, (first, second) = lax.scan(step, x, None, length=3)
    return (last, first, second)[kept]

  # The carry is gathered whatever is kept: it feeds the other outputs.
  assert count(body).total_bytes == gathers * 3 * 3 * PAYLOAD


def test_the_solver_alone_is_counted_of_a_linear_solve():
  def body(x):
    def matvec(v):
      return 2 * lax.psum(v, "data")

    return lax.custom_linear_solve(
      matvec, x, lambda _, b: gather(b), symmetric=True
    )

  floats = jax.ShapeDtypeStruct((8, 8), "float32")
  assert [move.op for move in count(body, floats).moves] == ["all_gather"]


def test_a_collective_of_unknown_size_is_an_error():
  def body(x):
    ones = jnp.ones(4, jnp.int32)
    return lax.ragged_all_to_all(x, x, ones, ones, ones, ones, axis_name="data")

  with pytest.raises(ValueError, match="got ragged_all_to_all over"):
    count(body)


def test_gradients_show_the_sum_that_checking_inserts():
  def loss(w, x):
    return jnp.sum((x @ w) ** 2)

  def local(w, x):
    return jax.grad(loss)(lax.pcast(w, "data", to="varying"), x)

  w = jax.ShapeDtypeStruct((8,), "float32")
  x = jax.ShapeDtypeStruct((16, 8), "float32")
  specs = dict(mesh=LINE, in_specs=(P(), P("data")))
  summed = jax.shard_map(jax.grad(loss), out_specs=P(), **specs)
  apart = jax.shard_map(local, out_specs=P("data"), **specs)
  assert step_bytes(summed, w, x).total_bytes == 1.5 * 32
  assert step_bytes(apart, w, x).moves == ()


def test_the_branches_of_platforms_are_not_those_of_levels():
  def on_platform(x):
    return lax.platform_dependent(x, cpu=gather, default=gather)

  def body(x):
    level = x[0, 0].astype(jnp.int32)
    return lax.switch(level, [on_platform, gather_bytes, gather], x)

  sent = [count(body, branch=i).total_bytes for i in range(3)]
  assert sent == [3 * PAYLOAD, 3 * PAYLOAD / 4, 3 * PAYLOAD]
  assert count(on_platform, branch=2).total_bytes == 3 * PAYLOAD
