"""Bytes read from a compiled program, held against the traced count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxmotion.wire import Move, compiled_bytes, step_bytes
from tests.meshes import mesh_of

PAYLOAD = 4 * 8 * 8


LINE, GRID = mesh_of(4), mesh_of(4, 2, names=("host", "chip"))


def lower(body, mesh, dtype="uint32"):
  """`body` on 8 x 8 elements a worker, different on each."""
  specs = dict(in_specs=P(mesh.axis_names), out_specs=P(mesh.axis_names))
  fn = jax.jit(jax.shard_map(body, mesh=mesh, **specs, check_vma=False))
  x = jax.ShapeDtypeStruct((32, 8), dtype)
  return fn, x, fn.lower(x).compile()


def count_both(body, mesh=LINE, dtype="uint32", **choices):
  """Ledgers of the compiled and of the traced program, which agree."""
  fn, x, program = lower(body, mesh, dtype)
  compiled = compiled_bytes(program, **choices)
  step = step_bytes(fn, x, **choices)
  assert weights(compiled) == weights(step)
  return compiled, step


def weights(ledger):
  """What a ledger says, less the axes that not every program states."""
  kinds = {(move.op, move.dtype) for move in ledger.moves}
  return {
    kind: ledger.select(op=kind[0], dtype=kind[1]).total_bytes for kind in kinds
  }


def gather(x):
  return lax.all_gather(x, "data").sum(0, dtype=x.dtype)


def gather_bytes(x):
  return gather(x.astype(jnp.uint8)).astype(x.dtype)


def scanned(x):
  return lax.scan(lambda c, _: (gather(c), None), x, None, length=3)[0]


def nested(x):
  return jax.jit(lambda y: gather(jax.jit(gather)(y) + 1))(x)


def several(x):
  return lax.psum((x, 3 * x[:5], 2 * x.astype(jnp.float32)), "data")


def switched(x):
  level = lax.pmax(x[0, 0], "data").astype(jnp.int32)
  return lax.switch(level, [lambda x: x, gather, gather_bytes], x)


def conditional(x):
  return lax.cond(lax.pmax(x[0, 0], "data") > 3, gather, gather_bytes, x)


def looped(x):
  return lax.while_loop(lambda c: lax.pmax(c[0, 0], "data") < 1000, gather, x)


def ring(x):
  return lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)])


def grouped(x):
  return lax.psum(x, "data", axis_index_groups=[[0, 1], [2, 3]])


def unused(x):
  return jax.jit(lambda y: (gather(y), y + 1))(x)[1]


# By collective: dtype, workers of a group, bytes as multiples of the payload.
BODIES = {
  "all_reduce": [
    ("float32", 4, 1.5, lambda x: lax.psum(x, "data")),
    ("uint32", 4, 1.5, lambda x: lax.pmax(x, "data")),
    ("uint32", 4, 1.5, lambda x: lax.pmin(x, "data")),
    ("uint32", 4, 1.5 * (2 + 5 / 8), several),
    ("uint32", 2, 1, grouped),
  ],
  "all_gather": [
    ("float32", 4, 3, lambda x: lax.all_gather(x, "data")),
    ("uint32", 4, 3, lambda x: lax.all_gather(x, "data", axis=1, tiled=True)),
    ("uint32", 4, 3 * 3, scanned),
    ("uint32", 4, 2 * 3, nested),
    ("uint8", 4, 3 / 4, gather),
    ("uint16", 4, 3 / 2, gather),
  ],
  "reduce_scatter": [
    ("float32", 4, 0.75, lambda x: lax.psum_scatter(x, "data", tiled=True))
  ],
  "all_to_all": [
    ("uint32", 4, 0.75, lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True)),
    ("uint32", 4, 0.75 / 2, lambda x: lax.all_to_all(x[:4], "data", 0, 1)),
  ],
  "collective_permute": [
    ("uint32", 4, 1, ring),
    ("uint32", 2, 1, lambda x: lax.ppermute(x, "data", [(0, 1)])),
  ],
  None: [("uint32", None, 0, unused)],
}


@pytest.mark.parametrize("op", BODIES)
def test_program_sends_what_the_trace_says(op):
  for dtype, workers, times, body in BODIES[op]:
    compiled, step = count_both(body, dtype=dtype)
    assert compiled.total_bytes == step.total_bytes == times * PAYLOAD
    kinds = {(move.op, move.axes, move.workers) for move in step.moves}
    assert kinds == ({(op, ("data",), workers)} if op else set())
    assert {move.workers for move in compiled.moves} <= {workers}


@pytest.mark.parametrize(
  ("axes", "received"), [("host", 3), ("chip", 1), (("host", "chip"), 7)]
)
def test_each_axis_of_a_grid_is_counted(axes, received):
  compiled, step = count_both(lambda x: lax.all_gather(x, axes), GRID)
  payload = step.moves[0].payload_bytes
  assert compiled.total_bytes == step.total_bytes == received * payload
  # Some compilers name the axes; those that do must name the right ones.
  named = axes if isinstance(axes, tuple) else (axes,)
  assert step.moves[0].axes == named
  assert compiled.moves[0].axes in ((), named)
  assert compiled.moves[0].workers == received + 1


def test_permuting_one_axis_of_a_grid_has_its_group_size():
  swap = lambda x: lax.ppermute(x, "chip", [(0, 1), (1, 0)])
  compiled, step = count_both(swap, GRID)
  assert compiled.moves[0]._replace(axes=("chip",)) == step.moves[0]
  assert step.moves[0].workers == 2


def test_a_chosen_level_is_the_one_counted_and_else_the_heaviest():
  fn, x, program = lower(switched, LINE)
  level, most = 1.5 * 4, 3 * PAYLOAD
  for branch, sent in {0: 0, 1: most, 2: most / 4, None: most}.items():
    compiled = compiled_bytes(program, branch=branch)
    assert weights(compiled) == weights(step_bytes(fn, x, branch=branch))
    assert compiled.total_bytes == level + sent
  with pytest.raises(ValueError, match=r"`branch` must be less than 3.*got 3"):
    compiled_bytes(program, branch=3)


def test_conditional_branches_are_numbered_as_traced():
  for branch, dtype in {0: "uint8", 1: "uint32", None: "uint32"}.items():
    compiled, _ = count_both(conditional, branch=branch)
    assert compiled.select(op="all_gather").moves[0].dtype == dtype


def test_a_loop_of_unknown_length_is_named():
  with pytest.raises(ValueError, match=r"`while_trips`.*loop %while"):
    compiled_bytes(lower(looped, LINE)[2])
  compiled, _ = count_both(looped, while_trips=5)
  assert compiled.total_bytes == 5 * 3 * PAYLOAD + 6 * 1.5 * 4


@pytest.mark.skipif(
  "jax.default_backend() != 'cpu'", reason="Other backends send bfloat16."
)
def test_bfloat16_sums_travel_as_float32_on_the_host():
  fn, x, program = lower(lambda x: lax.psum(x, "data"), LINE, "bfloat16")
  assert weights(step_bytes(fn, x)) == {
    ("all_reduce", "bfloat16"): 1.5 * 64 * 2
  }
  assert weights(compiled_bytes(program)) == {("all_reduce", "float32"): 384}


def test_sums_that_the_partitioner_adds_are_seen_here_alone():
  own, whole = (NamedSharding(LINE, spec) for spec in (P("data"), P()))
  fn = jax.jit(lambda x: x.sum(0), in_shardings=own, out_shardings=whole)
  x = jax.ShapeDtypeStruct((8, 16), "float32")
  assert step_bytes(fn, x).total_bytes == 0
  assert compiled_bytes(fn.lower(x).compile()).total_bytes == 1.5 * 4 * 16


def test_a_mesh_in_any_device_order_is_read():
  devices = np.array(jax.devices()[:4])[[3, 2, 0, 1]].reshape(2, 2)
  mesh = Mesh(devices, GRID.axis_names, axis_types=GRID.axis_types)
  compiled, _ = count_both(
    lambda x: (lax.psum(x, "host"), lax.all_gather(x, ("chip", "host"))), mesh
  )
  assert compiled.total_bytes == (1 + 3) * PAYLOAD


class Text:
  """A compiled program known by its text alone."""

  def __init__(self, *entry, before=""):
    lines = (
      "HloModule jit_f, is_scheduled=true, replica_count=1, num_partitions=8",
      "",
      before,
      "ENTRY %main.1_spmd (param.1: f32[8,8]) -> f32[8,8] {",
      "  %param.1 = f32[8,8]{1,0} parameter(0)",
      *("  " + line for line in entry),
      "}",
    )
    self.as_text = lambda: "\n".join(lines)


def read(*entry, before="", **choices):
  return compiled_bytes(Text(*entry, before=before), **choices).moves


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
    # A mesh names the axes of groups of devices.
    ("{{0,2,4,6},{1,3,5,7}}", ("host",), GRID),
    ("[2,4]<=[4,2]T(1,0)", ("host",), GRID),
    ("[4,2]<=[8]", ("chip",), GRID),
    ("{}", ("host", "chip"), GRID),
    ("{{0,1,2,3},{4,5,6,7}}", (), GRID),
  ],
)
def test_every_spelling_of_groups_is_read(groups, axes, workers):
  mesh, workers = (GRID, None) if workers is GRID else (None, workers)
  moves = read(
    "ROOT %psum.7 = f32[8,8]{1,0} all-reduce(%param.1), channel_id=1,"
    f" replica_groups={groups}, use_global_device_ids=true,"
    ' to_apply=%sum, metadata={op_name="jit(f)/psum[axes={(}]"}',
    mesh=mesh,
  )
  workers = workers or moves[0].workers
  assert moves == (Move("all_reduce", axes, workers, "float32", 256, 1),)


def test_asynchronous_forms_are_counted_once():
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


def test_wrapped_asynchronous_computations_are_counted_once():
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


def test_a_permutation_has_the_size_of_what_it_connects():
  said = "%p = f32[8,8] collective-permute(%param.1), source_target_pairs="
  assert read(said + "{{0,1},{2,3},{1,2},{4,0},{6,7},{5,5}}")[0].workers == 5


def test_tuples_typed_operands_and_comments_are_read():
  moves = read(
    "%bits = s4[7]{0:E(4)} constant({1,2,3,4,5,6,7})",
    "%flags = pred[3]{0} constant({1,0,1})",
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


def test_what_cannot_be_counted_is_an_error():
  for name in ("ragged-all-to-all", "collective-broadcast", "send"):
    with pytest.raises(ValueError, match=f"known size, got {name} in %x"):
      read(f"%x = f32[8,8]{{1,0}} {name}(%param.1, %token), channel_id=2")
  with pytest.raises(ValueError, match="must state its replica groups"):
    read("%x = f32[8,8] all-reduce(%param.1), to_apply=%sum")
  assert read("%x = f32[8,8] send(%param.1, %t), is_host_transfer=true") == ()


def test_two_way_conditionals_are_numbered_as_traced():
  branches = "".join(
    f"%{name} (p: {dtype}[8]) -> {dtype}[8] {{\n"
    f"  %p = {dtype}[8] parameter(0)\n"
    f"  ROOT %r = {dtype}[8] all-reduce(%p), replica_groups={{}}\n}}\n"
    for name, dtype in (("yes", "u8"), ("no", "u32"))
  )
  line = (
    "ROOT %c = f32[8,8] conditional(%flag, %param.1, %param.1),"
    " true_computation=%yes, false_computation=%no"
  )
  dtypes = [read(line, before=branches, branch=i)[0].dtype for i in range(2)]
  assert dtypes == ["uint32", "uint8"]
  assert read(line, before=branches)[0].dtype == "uint32"


def test_a_program_that_is_not_compiled_or_has_no_text_is_refused():
  silent = Text()
  silent.as_text = lambda: None
  with pytest.raises(ValueError, match="`compiled` must have a text"):
    compiled_bytes(silent)
  with pytest.raises(TypeError, match="`compiled` must be .*compile"):
    compiled_bytes(jax.jit(lambda x: 2 * x).lower(1.0))
