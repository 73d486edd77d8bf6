"""Bytes read from a compiled program, held against the traced count."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from jaxmotion.wire import Ledger, Move, compiled_bytes, step_bytes

PAYLOAD = 4 * 8 * 8


@pytest.fixture(scope="module")
def line() -> Mesh:
  return jax.make_mesh(
    (4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4]
  )


@pytest.fixture(scope="module")
def grid() -> Mesh:
  return jax.make_mesh(
    (2, 2),
    ("host", "chip"),
    axis_types=(AxisType.Auto,) * 2,
    devices=jax.devices()[:4],
  )


def compiled_and_step(
  body: Callable[..., Any], mesh: Mesh, dtype: str = "uint32", **choices: int
) -> tuple[Ledger, Ledger]:
  """Both counts of `body` on 8 x 8 elements a worker, different on each."""
  axes = P(mesh.axis_names)
  fn = jax.jit(
    jax.shard_map(
      body, mesh=mesh, in_specs=axes, out_specs=axes, check_vma=False
    )
  )
  x = jax.ShapeDtypeStruct((32, 8), dtype)
  program = fn.lower(x).compile()
  compiled = compiled_bytes(program, **choices)
  return compiled, step_bytes(fn, x, **choices)


def weights(ledger: Ledger) -> dict[tuple[str, str], float]:
  """What a ledger says, less the axes that not every program states."""
  kinds = {(move.op, move.dtype) for move in ledger.moves}
  return {
    (op, dtype): ledger.select(op=op, dtype=dtype).total_bytes
    for op, dtype in kinds
  }


def gather(x: jax.Array) -> jax.Array:
  return lax.all_gather(x, "data").sum(0, dtype=x.dtype)


def gather_bytes(x: jax.Array) -> jax.Array:
  return gather(x.astype(jnp.uint8)).astype(x.dtype)


def scanned(x: jax.Array) -> jax.Array:
  return lax.scan(lambda c, _: (gather(c), None), x, None, length=3)[0]


def nested(x: jax.Array) -> jax.Array:
  return jax.jit(lambda y: gather(jax.jit(gather)(y) + 1))(x)


def several(x: jax.Array) -> Any:
  return lax.psum((x, 3 * x[:5], 2 * x.astype(jnp.float32)), "data")


def switched(x: jax.Array) -> jax.Array:
  level = lax.pmax(x[0, 0], "data").astype(jnp.int32)
  return lax.switch(level, [lambda x: x, gather, gather_bytes], x)


def conditional(x: jax.Array) -> jax.Array:
  return lax.cond(lax.pmax(x[0, 0], "data") > 3, gather, gather_bytes, x)


def looped(x: jax.Array) -> jax.Array:
  return lax.while_loop(lambda c: lax.pmax(c[0, 0], "data") < 1000, gather, x)


BODIES = {
  "all_reduce": (lambda x: lax.psum(x, "data"), 1.5 * PAYLOAD),
  "all_reduce_max": (lambda x: lax.pmax(x, "data"), 1.5 * PAYLOAD),
  "all_gather": (lambda x: lax.all_gather(x, "data"), 3 * PAYLOAD),
  "all_gather_tiled": (
    lambda x: lax.all_gather(x, "data", axis=1, tiled=True),
    3 * PAYLOAD,
  ),
  "reduce_scatter": (
    lambda x: lax.psum_scatter(x, "data", tiled=True),
    0.75 * PAYLOAD,
  ),
  "all_to_all": (
    lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True),
    0.75 * PAYLOAD,
  ),
  "all_to_all_transposing": (
    lambda x: lax.all_to_all(x[:4], "data", 0, 1),
    0.75 * PAYLOAD / 2,
  ),
  "ring": (
    lambda x: lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)]),
    PAYLOAD,
  ),
  "one_link": (lambda x: lax.ppermute(x, "data", [(0, 1)]), PAYLOAD),
  "groups": (
    lambda x: lax.psum(x, "data", axis_index_groups=[[0, 1], [2, 3]]),
    PAYLOAD,
  ),
  "scanned": (scanned, 3 * 3 * PAYLOAD),
  "nested": (nested, 2 * 3 * PAYLOAD),
  "several": (several, 1.5 * PAYLOAD * (2 + 5 / 8)),
  "unused": (lambda x: (gather(x), x + 1)[1], 0),
  "none": (lambda x: x + 1, 0),
}


@pytest.mark.parametrize("dtype", ["uint32", "float32"])
@pytest.mark.parametrize("name", BODIES)
def test_program_sends_what_the_trace_says(
  name: str, dtype: str, line: Mesh
) -> None:
  body, expected = BODIES[name]
  compiled, step = compiled_and_step(body, line, dtype)
  assert weights(compiled) == weights(step)
  assert compiled.total_bytes == step.total_bytes == expected


@pytest.mark.skipif(
  not hasattr(lax, "psum_scatter_start"), reason="Needs a newer JAX."
)
def test_asynchronous_collectives_are_counted_once(line: Mesh) -> None:
  def body(x: jax.Array) -> jax.Array:
    start: Any = getattr(lax, "psum_scatter_start")  # noqa: B009
    return start(x, "data", tiled=True).done()

  compiled, step = compiled_and_step(body, line)
  assert weights(compiled) == weights(step)
  assert compiled.total_bytes == 0.75 * PAYLOAD


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_words_travel_in_their_own_size(dtype: str, line: Mesh) -> None:
  compiled, step = compiled_and_step(gather, line, dtype)
  assert weights(compiled) == weights(step)
  assert compiled.moves[0].dtype == dtype


@pytest.mark.parametrize(
  ("axes", "received"), [("host", 1), ("chip", 1), (("host", "chip"), 3)]
)
def test_each_axis_of_a_grid_is_counted(
  axes: Any, received: int, grid: Mesh
) -> None:
  compiled, step = compiled_and_step(lambda x: lax.all_gather(x, axes), grid)
  assert compiled.total_bytes == step.total_bytes == received * PAYLOAD
  # Some compilers name the axes; those that do must name the right ones.
  named = axes if isinstance(axes, tuple) else (axes,)
  assert compiled.moves[0].axes in ((), named)
  assert compiled.moves[0].workers == received + 1


def test_permuting_one_axis_of_a_grid_has_its_group_size(grid: Mesh) -> None:
  compiled, step = compiled_and_step(
    lambda x: lax.ppermute(x, "host", [(0, 1), (1, 0)]), grid
  )
  assert compiled.moves[0]._replace(axes=("host",)) == step.moves[0]
  assert step.moves[0].workers == 2


@pytest.mark.parametrize("branch", [0, 1, 2])
def test_a_chosen_level_is_the_one_counted(branch: int, line: Mesh) -> None:
  compiled, step = compiled_and_step(switched, line, branch=branch)
  level = 1.5 * 4
  expected = level + (0, 3 * PAYLOAD, 3 * PAYLOAD / 4)[branch]
  assert weights(compiled) == weights(step)
  assert compiled.total_bytes == expected


@pytest.mark.parametrize("body", [switched, conditional])
def test_the_heaviest_branch_is_counted_by_default(
  body: Callable[..., Any], line: Mesh
) -> None:
  compiled, step = compiled_and_step(body, line)
  assert weights(compiled) == weights(step)
  assert compiled.total_bytes == 1.5 * 4 + 3 * PAYLOAD


def test_conditional_branches_are_numbered_as_traced(line: Mesh) -> None:
  for branch, dtype in enumerate(("uint8", "uint32")):
    compiled, step = compiled_and_step(conditional, line, branch=branch)
    assert weights(compiled) == weights(step)
    assert compiled.select(op="all_gather").moves[0].dtype == dtype


def test_a_branch_out_of_range_is_an_error(line: Mesh) -> None:
  program = lower(switched, line)
  with pytest.raises(ValueError, match=r"`branch` must be less than 3.*got 3"):
    compiled_bytes(program, branch=3)


def test_a_loop_of_unknown_length_is_named(line: Mesh) -> None:
  program = lower(looped, line)
  with pytest.raises(ValueError, match=r"`while_trips`.*loop %while"):
    compiled_bytes(program)
  compiled, step = compiled_and_step(looped, line, while_trips=5)
  assert weights(compiled) == weights(step)
  assert compiled.total_bytes == 5 * 3 * PAYLOAD + 6 * 1.5 * 4


@pytest.mark.skipif(
  "jax.default_backend() != 'cpu'", reason="Other backends send bfloat16."
)
def test_bfloat16_sums_travel_as_float32_on_the_host(line: Mesh) -> None:
  compiled, step = compiled_and_step(
    lambda x: lax.psum(x, "data"), line, "bfloat16"
  )
  assert step.moves[0].dtype == "bfloat16"
  assert compiled.moves[0].dtype == "float32"
  assert step.total_bytes == 1.5 * 64 * 2
  assert compiled.total_bytes == 1.5 * 64 * 4


def test_sums_that_the_partitioner_adds_are_seen_here_alone(
  line: Mesh,
) -> None:
  fn = jax.jit(
    lambda x: x.sum(0),
    in_shardings=NamedSharding(line, P("data")),
    out_shardings=NamedSharding(line, P()),
  )
  x = jax.ShapeDtypeStruct((8, 16), "float32")
  assert step_bytes(fn, x).total_bytes == 0
  assert compiled_bytes(fn.lower(x).compile()).total_bytes == 1.5 * 4 * 16


def test_a_mesh_in_any_device_order_is_read() -> None:
  devices = np.array(jax.devices()[:4])[[3, 2, 0, 1]].reshape(2, 2)
  mesh = Mesh(devices, ("host", "chip"), axis_types=(AxisType.Auto,) * 2)
  compiled, step = compiled_and_step(
    lambda x: (lax.psum(x, "host"), lax.all_gather(x, ("chip", "host"))), mesh
  )
  assert weights(compiled) == weights(step)
  assert compiled.total_bytes == (1 + 3) * PAYLOAD


class Text:
  """A compiled program known by its text alone."""

  def __init__(self, *entry: str, before: str = "") -> None:
    self._text = "\n".join(
      (
        "HloModule jit_f, is_scheduled=true, replica_count=1, num_partitions=8",
        "",
        before,
        "ENTRY %main.1_spmd (param.1: f32[8,8]) -> f32[8,8] {",
        "  %param.1 = f32[8,8]{1,0} parameter(0)",
        *("  " + line for line in entry),
        "}",
      )
    )

  def as_text(self) -> str:
    return self._text


def read(*entry: str, before: str = "", **choices: int) -> tuple[Move, ...]:
  program: Any = Text(*entry, before=before)
  return compiled_bytes(program, **choices).moves


@pytest.mark.parametrize(
  ("groups", "axes", "workers"),
  [
    ("{{0,1,2,3},{4,5,6,7}}", (), 4),
    ("{{0,1},{2,3},{4,5},{6,7}}", (), 2),
    ("{{0,4,2},{1}}", (), 3),
    ("{}", (), 8),
    ("[2,4]<=[8]", (), 4),
    ("[4,2]<=[2,4]T(1,0)", (), 2),
    ("mesh['data'=8] {'data'}", ("data",), 8),
    ("mesh['a'=2,'b'=4] {'b'}", ("b",), 4),
    ("mesh['a'=2,'b'=4] {'b','a'}", ("b", "a"), 8),
    ("mesh['a'=8] {'a':(2)4}", ("a",), 4),
    ("mesh['a'=2,'b'=4], device_ids=([8]<=[4,2]T(1,0)) {'a'}", ("a",), 2),
    ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", (), 4),
  ],
)
def test_every_spelling_of_groups_is_read(
  groups: str, axes: tuple[str, ...], workers: int
) -> None:
  moves = read(
    "ROOT %psum.7 = f32[8,8]{1,0} all-reduce(%param.1), channel_id=1,"
    f" replica_groups={groups}, use_global_device_ids=true,"
    ' to_apply=%sum, metadata={op_name="jit(f)/psum[axes={(}]"}'
  )
  assert moves == (Move("all_reduce", axes, workers, "float32", 256, 1),)


@pytest.mark.parametrize(
  ("groups", "axes"),
  [
    ("{{0,2,4,6},{1,3,5,7}}", ("host",)),
    ("[2,4]<=[4,2]T(1,0)", ("host",)),
    ("[4,2]<=[8]", ("device",)),
    ("{}", ("host", "device")),
    ("{{0,1,2,3},{4,5,6,7}}", ()),
  ],
)
def test_a_mesh_names_the_axes_of_groups_of_devices(
  groups: str, axes: tuple[str, ...]
) -> None:
  mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("host", "device"))
  text: Any = Text(
    f"ROOT %a = f32[8,8]{{1,0}} all-reduce(%param.1), replica_groups={groups}"
  )
  assert compiled_bytes(text, mesh=mesh).moves[0].axes == axes


def test_asynchronous_forms_are_counted_once() -> None:
  groups = "channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}"
  moves = read(
    "%g = (f32[8,8]{1,0}, f32[32,8]{1,0}) all-gather-start(%param.1),"
    f" {groups}",
    "%h = f32[32,8]{1,0} all-gather-done(%g)",
    f"%r = f32[8,8]{{1,0}} all-reduce-start(%param.1), {groups}, to_apply=%sum",
    "%s = f32[8,8]{1,0} all-reduce-done(%r)",
    "%p = (f32[8,8], f32[8,8], u32[], u32[])"
    " collective-permute-start(%param.1),"
    " source_target_pairs={{0,1},{1,0},{2,2}}",
    "%q = f32[8,8] collective-permute-done(%p)",
  )
  assert moves == (
    Move("all_gather", (), 4, "float32", 256, 1),
    Move("all_reduce", (), 4, "float32", 256, 1),
    Move("collective_permute", (), 2, "float32", 256, 1),
  )


def test_wrapped_asynchronous_computations_are_counted_once() -> None:
  wrapped = "\n".join(
    (
      "%wrapped (p: f32[8,8]) -> f32[2,8] {",
      "  %p = f32[8,8]{1,0} parameter(0)",
      "  ROOT %rs = f32[2,8]{1,0} reduce-scatter(%p),"
      " replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%sum",
      '}, execution_thread="parallel"',
      "",
    )
  )
  moves = read(
    "%a = ((f32[8,8]{1,0}), f32[2,8]{1,0}, u32[]) async-start(%param.1),"
    " calls=%wrapped",
    "ROOT %b = f32[2,8]{1,0} async-done(%a)",
    before=wrapped,
  )
  assert moves == (Move("reduce_scatter", (), 4, "float32", 256, 1),)


def test_a_permutation_has_the_size_of_what_it_connects() -> None:
  (move,) = read(
    "%p = f32[8,8] collective-permute(%param.1),"
    " source_target_pairs={{0,1},{2,3},{1,2},{4,0},{6,7},{5,5}}"
  )
  assert move.workers == 5


def test_tuples_typed_operands_and_comments_are_read() -> None:
  moves = read(
    "%bits = s4[7]{0:E(4)} constant({1,2,3,4,5,6,7})",
    "%all-reduce = (f32[8,8]{1,0:T(8,128)}, /*index=1*/s4[7]{0:E(4)}, pred[3])"
    " all-reduce(f32[8,8]{1,0:T(8,128)} %param.1, /*index=1*/%bits,"
    " pred[3]{0} %flags), replica_groups={{0,1,2,3}}, to_apply=%sum,"
    " control-predecessors={%param.1}",
  )
  assert moves == (
    Move("all_reduce", (), 4, "float32", 256, 1),
    Move("all_reduce", (), 4, "int4", 4, 1),
    Move("all_reduce", (), 4, "bool", 3, 1),
  )


@pytest.mark.parametrize(
  ("code", "dtype", "size"),
  [
    ("u2", "uint2", 2),
    ("s8", "int8", 5),
    ("bf16", "bfloat16", 10),
    ("f8e4m3fn", "float8_e4m3fn", 5),
    ("f4e2m1fn", "float4_e2m1fn", 3),
    ("c64", "complex64", 40),
  ],
)
def test_element_types_are_named_and_weighed(
  code: str, dtype: str, size: int
) -> None:
  moves = read(
    f"%x = {code}[5]{{0}} custom-call(%param.1)",
    f"%y = {code}[20]{{0}} all-gather(%x), replica_groups={{{{0,1,2,3}}}}",
  )
  assert moves == (Move("all_gather", (), 4, dtype, size, 1),)


@pytest.mark.parametrize(
  ("collective", "name"),
  [
    ("ragged-all-to-all(%param.1)", "ragged-all-to-all"),
    ("collective-broadcast(%param.1)", "collective-broadcast"),
    ("send(%param.1, %token), channel_id=2", "send"),
  ],
)
def test_what_cannot_be_counted_is_an_error(collective: str, name: str) -> None:
  with pytest.raises(ValueError, match=f"known size, got {name} in %x"):
    read(f"%x = f32[8,8]{{1,0}} {collective}")


def test_two_way_conditionals_are_numbered_as_traced() -> None:
  branch = (
    "%{name} (p: f32[8,8]) -> f32[8,8] {{\n"
    "  %p = f32[8,8] parameter(0)\n"
    "  ROOT %r = f32[8,8] all-reduce({operand}), replica_groups={{}}\n"
    "}}\n"
  )
  branches = branch.format(name="yes", operand="u8[8] %p") + branch.format(
    name="no", operand="u32[8] %p"
  )
  line = (
    "ROOT %c = f32[8,8] conditional(%flag, %param.1, %param.1),"
    " true_computation=%yes, false_computation=%no"
  )
  dtypes = [read(line, before=branches, branch=i)[0].dtype for i in range(2)]
  assert dtypes == ["uint32", "uint8"]
  assert read(line, before=branches)[0].dtype == "uint32"


def test_sending_to_the_host_is_not_a_collective() -> None:
  assert read("%x = f32[8,8] send(%param.1, %t), is_host_transfer=true") == ()


def test_a_collective_without_groups_is_an_error() -> None:
  with pytest.raises(ValueError, match="must state its replica groups"):
    read("%x = f32[8,8] all-reduce(%param.1), to_apply=%sum")


def test_a_program_without_text_is_an_error() -> None:
  class Silent:
    def as_text(self) -> None:
      return None

  program: Any = Silent()
  with pytest.raises(ValueError, match="`compiled` must have a text"):
    compiled_bytes(program)


def lower(body: Callable[..., Any], mesh: Mesh) -> jax.stages.Compiled:
  axes = P(mesh.axis_names)
  fn = jax.shard_map(
    body, mesh=mesh, in_specs=axes, out_specs=axes, check_vma=False
  )
  x = jax.ShapeDtypeStruct((32, 8), "uint32")
  return jax.jit(fn).lower(x).compile()


def test_a_lowered_program_is_refused():
  lowered = jax.jit(lambda x: 2 * x).lower(1.0)
  with pytest.raises(TypeError, match="`compiled` must be .*compile"):
    compiled_bytes(lowered)
