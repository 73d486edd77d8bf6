"""Bytes counted from a traced function."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from jaxmotion.wire import Move, step_bytes

# Tracing needs no devices, so a mesh of any shape will do.
LINE = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
GRID = AbstractMesh((2, 3), ("host", "chip"), axis_types=(AxisType.Auto,) * 2)
WORDS = jax.ShapeDtypeStruct((8, 8), "uint32")
PAYLOAD = 4 * 8 * 8


def on(mesh: AbstractMesh, body: Callable[..., Any]) -> Callable[..., Any]:
  """`body` on every worker of `mesh`, all of them with the same input."""
  return jax.shard_map(
    body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
  )


def gather(x: jax.Array) -> jax.Array:
  return lax.all_gather(x, "data").sum(0, dtype=x.dtype)


def gather_bytes(x: jax.Array) -> jax.Array:
  return gather(x.astype(jnp.uint8)).astype(x.dtype)


RING = [(i, (i + 1) % 4) for i in range(4)]


@pytest.mark.parametrize(
  ("body", "op", "expected"),
  [
    (lambda x: lax.psum(x, "data"), "all_reduce", 1.5 * PAYLOAD),
    (lambda x: lax.pmax(x, "data"), "all_reduce", 1.5 * PAYLOAD),
    (lambda x: lax.pmin(x, "data"), "all_reduce", 1.5 * PAYLOAD),
    (lambda x: lax.all_gather(x, "data"), "all_gather", 3 * PAYLOAD),
    (
      lambda x: lax.psum_scatter(x, "data", tiled=True),
      "reduce_scatter",
      0.75 * PAYLOAD,
    ),
    (
      lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True),
      "all_to_all",
      0.75 * PAYLOAD,
    ),
    (
      lambda x: lax.ppermute(x, "data", RING),
      "collective_permute",
      PAYLOAD,
    ),
  ],
)
def test_every_collective_is_counted(
  body: Callable[..., Any], op: str, expected: float
) -> None:
  ledger = step_bytes(on(LINE, body), WORDS)
  assert ledger.moves == (Move(op, ("data",), 4, "uint32", PAYLOAD, 1),)
  assert ledger.total_bytes == expected


def test_invariant_collectives_of_checked_programs_are_counted() -> None:
  def body(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    total = lax.psum(x, "data")
    return total, lax.all_gather(x, "data", to="invarying")

  checked = jax.shard_map(
    body, mesh=LINE, in_specs=P("data"), out_specs=P(), check_vma=True
  )
  ledger = step_bytes(checked, jax.ShapeDtypeStruct((32, 8), "uint32"))
  assert ledger.select(op="all_reduce").total_bytes == 1.5 * PAYLOAD
  assert ledger.select(op="all_gather").total_bytes == 3 * PAYLOAD


def test_jitted_and_plain_functions_and_arrays_count_the_same() -> None:
  plain = on(LINE, gather)
  expected = step_bytes(plain, WORDS)
  assert expected.total_bytes == 3 * PAYLOAD
  assert step_bytes(jax.jit(plain), WORDS) == expected
  assert step_bytes(plain, jnp.zeros((8, 8), jnp.uint32)) == expected


def test_no_collective_is_no_bytes() -> None:
  assert step_bytes(lambda x: 2 * x, WORDS).moves == ()
  assert step_bytes(on(LINE, lambda x: 2 * x), WORDS).moves == ()


def test_marking_as_varying_and_worker_numbers_move_nothing() -> None:
  def body(x: jax.Array) -> jax.Array:
    x = lax.pcast(x, "data", to="varying")
    return x + lax.axis_index("data").astype(x.dtype)

  varying = jax.shard_map(body, mesh=LINE, in_specs=P(), out_specs=P("data"))
  assert step_bytes(varying, WORDS).moves == ()


def test_a_group_of_one_sends_nothing() -> None:
  alone = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,))

  def body(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda c: c.sum() < 9, gather, lax.psum(x, "data"))

  assert step_bytes(on(alone, body), WORDS).total_bytes == 0


def test_several_operands_keep_their_dtypes() -> None:
  def body(x: jax.Array) -> Any:
    return lax.psum((x, x.astype(jnp.float16), x + 1), "data")

  ledger = step_bytes(on(LINE, body), WORDS)
  assert ledger.select(dtype="uint32").moves[0].count == 2
  assert ledger.select(dtype="float16").total_bytes == 1.5 * PAYLOAD / 2
  assert ledger.total_bytes == 1.5 * PAYLOAD * 2.5


def test_sub_byte_elements_are_counted_by_bits() -> None:
  odd = jax.ShapeDtypeStruct((5,), "uint32")
  ledger = step_bytes(on(LINE, lambda x: gather(x.astype(jnp.int4))), odd)
  assert ledger.moves[0].payload_bytes == 3  # 20 bits, rounded up.


def test_keys_are_counted_by_their_words() -> None:
  key = jax.eval_shape(lambda: jax.random.key(0))
  body = on(LINE, lambda k: lax.all_gather(k, "data"))
  size = jax.eval_shape(lambda k: jax.random.key_data(k), key).size
  assert step_bytes(body, key).moves[0].payload_bytes == 4 * size


def test_axes_are_told_apart_and_multiplied() -> None:
  def body(x: jax.Array) -> Any:
    names: Any
    for names in ("host", "chip", ("host", "chip")):
      yield lax.all_gather(x, names)

  ledger = step_bytes(on(GRID, lambda x: tuple(body(x))), WORDS)
  assert ledger.per_axis() == {
    ("host",): 1 * PAYLOAD,
    ("chip",): 2 * PAYLOAD,
    ("host", "chip"): 5 * PAYLOAD,
  }


def test_index_groups_set_the_size_of_a_group() -> None:
  groups = [[0, 1], [2, 3]]
  ledger = step_bytes(
    on(LINE, lambda x: lax.psum(x, "data", axis_index_groups=groups)), WORDS
  )
  assert ledger.moves[0].workers == 2
  assert ledger.total_bytes == PAYLOAD


def test_a_permutation_that_moves_nothing_weighs_nothing() -> None:
  still = [(i, i) for i in range(4)]
  ledger = step_bytes(on(LINE, lambda x: lax.ppermute(x, "data", still)), WORDS)
  assert ledger.total_bytes == 0


def test_nested_calls_are_followed() -> None:
  @jax.custom_vjp
  def custom(x: jax.Array) -> jax.Array:
    return gather(x)

  custom.defvjp(lambda x: (gather(x), None), lambda _, g: (g,))

  @jax.custom_jvp
  def tangent(x: jax.Array) -> jax.Array:
    return gather(x)

  tangent.defjvps(lambda t, out, x: t)

  def body(x: jax.Array) -> jax.Array:
    for wrap in (jax.jit, jax.checkpoint, lambda f: f):
      x = wrap(gather)(x)
    return tangent(custom(x))

  floats = jax.ShapeDtypeStruct((8, 8), "float32")
  assert step_bytes(on(LINE, body), floats).total_bytes == 5 * 3 * PAYLOAD


def test_mapped_programs_are_followed() -> None:
  workers = jax.device_count()
  body = jax.pmap(lambda x: lax.psum(x, "i"), axis_name="i")
  ledger = step_bytes(body, jax.ShapeDtypeStruct((workers, 3), "float32"))
  assert ledger.moves == (
    Move("all_reduce", ("i",), workers, "float32", 12, 1),
  )


def test_vmap_multiplies_the_payload_and_its_own_axis_moves_nothing() -> None:
  batched = jax.vmap(lambda x: lax.psum(x, "data"))
  assert step_bytes(on(LINE, batched), WORDS).total_bytes == 1.5 * PAYLOAD
  own = jax.vmap(lambda x: lax.psum(x, "lane"), axis_name="lane")
  assert step_bytes(own, WORDS).moves == ()
  both = jax.vmap(lambda x: lax.psum(x, ("lane", "data")), axis_name="lane")
  assert step_bytes(on(LINE, both), WORDS).total_bytes == 1.5 * PAYLOAD / 8


def test_loops_of_known_length_multiply() -> None:
  def scanned(x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (gather(c), None), x, None, length=3)[0]

  def nested(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 5, lambda _, c: scanned(c), x)

  ledger = step_bytes(on(LINE, scanned), WORDS)
  assert ledger.moves[0].count == 3
  assert step_bytes(on(LINE, nested), WORDS).moves[0].count == 15


def counted_while(x: jax.Array) -> jax.Array:
  def unbounded_body(c: jax.Array) -> jax.Array:
    return gather(c)

  def condition(c: jax.Array) -> jax.Array:
    return lax.pmax(c[0, 0], "data") < 1000

  return lax.while_loop(condition, unbounded_body, x)


def test_a_loop_of_unknown_length_must_be_given_one() -> None:
  with pytest.raises(ValueError, match=r"`while_trips`.*unbounded_body"):
    step_bytes(on(LINE, counted_while), WORDS)
  ledger = step_bytes(on(LINE, counted_while), WORDS, while_trips=6)
  assert ledger.select(op="all_gather").moves[0].count == 6
  # The condition is also tested on the way out.
  assert ledger.select(op="all_reduce").moves[0].count == 7


def test_a_loop_that_sends_nothing_needs_no_length() -> None:
  def body(x: jax.Array) -> jax.Array:
    x = lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c + 1, x)
    return gather(x)

  assert step_bytes(on(LINE, body), WORDS).total_bytes == 3 * PAYLOAD


def switched(x: jax.Array) -> jax.Array:
  branches = [lambda x: x, gather, gather_bytes]
  return lax.switch(x[0, 0].astype(jnp.int32), branches, x)


def test_the_heaviest_branch_is_counted_unless_one_is_chosen() -> None:
  fn = on(LINE, switched)
  heaviest = step_bytes(fn, WORDS)
  chosen = [step_bytes(fn, WORDS, branch=i) for i in range(3)]
  assert [ledger.total_bytes for ledger in chosen] == [
    0,
    3 * PAYLOAD,
    3 * PAYLOAD / 4,
  ]
  assert heaviest == chosen[1]


def test_a_branch_out_of_range_is_an_error_only_where_bytes_move() -> None:
  with pytest.raises(ValueError, match=r"`branch` must be less than 3.*got 3"):
    step_bytes(on(LINE, switched), WORDS, branch=3)

  def quiet(x: jax.Array) -> jax.Array:
    return gather(lax.cond(x[0, 0] > 0, lambda: x, lambda: x + 1))

  ledger = step_bytes(on(LINE, quiet), WORDS, branch=3)
  assert ledger.total_bytes == 3 * PAYLOAD


@pytest.mark.parametrize("name", ["branch", "while_trips"])
@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_choices_are_checked(name: str, value: Any) -> None:
  kinds = (TypeError, ValueError)
  with pytest.raises(kinds, match=f"`{name}` must be an integer >= 0, got"):
    step_bytes(on(LINE, gather), WORDS, **{name: value})


def test_what_nobody_uses_is_not_counted() -> None:
  def body(x: jax.Array) -> jax.Array:
    unused = jax.jit(lambda y: (gather(y), y + 1))(x)
    return unused[1]

  assert step_bytes(on(LINE, body), WORDS).moves == ()


@pytest.mark.parametrize(("kept", "gathers"), [(0, 1), (1, 2), (2, 1)])
def test_a_scan_is_counted_for_the_outputs_in_use(
  kept: int, gathers: int
) -> None:
  def step(c: jax.Array, _: None) -> Any:
    return gather(c), (gather(c + 1), c + 2)

  def body(x: jax.Array) -> jax.Array:
    last, (first, second) = lax.scan(step, x, None, length=3)
    return (last, first, second)[kept]

  # The carry is gathered whatever is kept: it feeds the other outputs.
  ledger = step_bytes(on(LINE, body), WORDS)
  assert ledger.total_bytes == gathers * 3 * 3 * PAYLOAD


def test_the_solver_alone_is_counted_of_a_linear_solve() -> None:
  def body(x: jax.Array) -> jax.Array:
    def matvec(v: jax.Array) -> jax.Array:
      return 2 * lax.psum(v, "data")

    return lax.custom_linear_solve(
      matvec, x, lambda _, b: gather(b), symmetric=True
    )

  floats = jax.ShapeDtypeStruct((8, 8), "float32")
  ledger = step_bytes(on(LINE, body), floats)
  assert [move.op for move in ledger.moves] == ["all_gather"]


def test_a_collective_of_unknown_size_is_an_error() -> None:
  def body(x: jax.Array) -> jax.Array:
    ones = jnp.ones(4, jnp.int32)
    return lax.ragged_all_to_all(x, x, ones, ones, ones, ones, axis_name="data")

  with pytest.raises(ValueError, match="got ragged_all_to_all over"):
    step_bytes(on(LINE, body), WORDS)


def test_gradients_show_the_sum_that_checking_inserts() -> None:
  def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum((x @ w) ** 2)

  def replicated(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.grad(loss)(w, x)

  def local(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.grad(loss)(lax.pcast(w, "data", to="varying"), x)

  w = jax.ShapeDtypeStruct((8,), "float32")
  x = jax.ShapeDtypeStruct((16, 8), "float32")
  specs: dict[str, Any] = {"mesh": LINE, "in_specs": (P(), P("data"))}
  summed = jax.shard_map(replicated, out_specs=P(), **specs)
  apart = jax.shard_map(local, out_specs=P("data"), **specs)
  assert step_bytes(summed, w, x).total_bytes == 1.5 * 32
  assert step_bytes(apart, w, x).moves == ()


def test_the_branches_of_platforms_are_not_those_of_levels() -> None:
  def on_platform(x: jax.Array) -> jax.Array:
    return lax.platform_dependent(x, cpu=gather, default=gather)

  def body(x: jax.Array) -> jax.Array:
    level = x[0, 0].astype(jnp.int32)
    return lax.switch(level, [on_platform, gather_bytes, gather], x)

  sent = [
    step_bytes(on(LINE, body), WORDS, branch=i).total_bytes for i in range(3)
  ]
  assert sent == [3 * PAYLOAD, 3 * PAYLOAD / 4, 3 * PAYLOAD]
  fn = on(LINE, on_platform)
  assert step_bytes(fn, WORDS, branch=2).total_bytes == 3 * PAYLOAD
