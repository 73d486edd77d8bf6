import pytest

from experiments.gpu_compile import hlo

SLICES = """
HloModule jit_f, is_scheduled=true

%fused_slice (p0: f32[8,1024], p1: s32[]) -> f32[1,1024] {
  %p0 = f32[8,1024]{1,0} parameter(0)
  %b = f32[8,1024]{1,0} bitcast(%p0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %d = f32[1,1024]{1,0} dynamic-slice(%b, %p1, %zero)
}

%fused_update (p0: f32[8,1024], p1: f32[1,1024], p2: s32[]) -> f32[8,1024] {
  %p0 = f32[8,1024]{1,0} parameter(0)
  %p1 = f32[1,1024]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %u = f32[8,1024]{1,0} dynamic-update-slice(%p0, %p1, %p2, %zero)
}

ENTRY %main (x: f32[8,1024], i: s32[]) -> f32[8,1024] {
  %x = f32[8,1024]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %row = f32[1,1024]{1,0} fusion(%x, %i), kind=kLoop, calls=%fused_slice
  ROOT %y = f32[8,1024]{1,0} fusion(%x, %row, %i), calls=%fused_update
}
"""
CONTROL = """
%body (t: (s32[], f32[64])) -> (s32[], f32[64]) {
  %t = (s32[], f32[64]{0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %v = f32[64]{0} get-tuple-element(%t), index=1
  %w = f32[64]{0} negate(%v)
  ROOT %r = (s32[], f32[64]{0}) tuple(%n, %w)
}

%condition (t: (s32[], f32[64])) -> pred[] {
  %t = (s32[], f32[64]{0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

%little (a: f32[64]) -> f32[64] {
  %a = f32[64]{0} parameter(0)
  ROOT %same = f32[64]{0} bitcast(%a)
}

%much (a: f32[64]) -> f32[64] {
  %a = f32[64]{0} parameter(0)
  ROOT %sorted = f32[64]{0} sort(%a), dimensions={0}, to_apply=%less
}

ENTRY %main (t: (s32[], f32[64])) -> f32[64] {
  %t = (s32[], /*index=1*/f32[64]{0}) parameter(0)
  %p = pred[] constant(true)
  %loop = (s32[], f32[64]{0}) while(%t), condition=%condition, body=%body TRIPS
  %v = f32[64]{0} get-tuple-element(%loop), index=1
  ROOT %y = f32[64]{0} conditional(%p, %v, %v), BRANCHES
}
"""
BRANCHES = "branch_computations={%little, %much}"
TRIPS = ', backend_config={"known_trip_count":{"n":"5"}}'


def _control(trips):
  return CONTROL.replace("TRIPS", trips).replace("BRANCHES", BRANCHES)


def _entry(line):
  return f"""
ENTRY %main (x: f32[256]) -> f32[256] {{
  %x = f32[256]{{0}} parameter(0)
  {line}
}}
"""


def test_slices_and_updates_move_only_what_they_touch():
  row, out = hlo.list_kernels(SLICES, {})
  assert (row.read_bytes, row.write_bytes) == (4096 + 4, 4096)
  assert (out.read_bytes, out.write_bytes) == (4096 + 4, 4096)


def test_a_loop_counts_every_iteration_and_a_conditional_its_larger_branch():
  negate, sort = hlo.list_kernels(_control(TRIPS), {"sorted": 3})
  assert (negate.name, negate.runs, negate.traffic_bytes) == ("w", 5, 2560)
  assert (sort.name, sort.launches, sort.traffic_bytes) == ("sorted", 3, 1536)
  # A loop of unknown length has unknown traffic.
  negate, _ = hlo.list_kernels(_control(""), {})
  assert negate.runs is None
  assert negate.traffic_bytes is None


@pytest.mark.parametrize(
  ("result", "written"),
  [
    ("f32[256]{0}", 1024),
    ("bf16[16,16]{1,0}", 512),
    ("f8e4m3fn[256]{0}", 256),
    ("pred[256]{0}", 256),
    ("s4[256]{0}", 256),
    ("s4[256]{0:E(4)}", 128),
    ("c64[2]{0:S(5)}", 16),
    ("f32[]", 4),
    ("(f32[2]{0}, /*index=1*/u8[3]{0}, token[])", 11),
  ],
)
def test_bytes_of_a_result(result, written):
  (kernel,) = hlo.list_kernels(
    _entry(f'ROOT %y = {result} custom-call(%x), metadata={{op_name="f)("}}'),
    {},
  )
  assert kernel.opcode == "custom-call"
  assert (kernel.read_bytes, kernel.write_bytes) == (1024, written)


def test_repeated_operands_and_asynchronous_copies_count_once():
  (kernel,) = hlo.list_kernels(_entry("ROOT %y = f32[256]{0} add(%x, %x)"), {})
  assert kernel.read_bytes == 1024
  (kernel,) = hlo.list_kernels(
    _entry(
      "%s = (f32[256]{0:S(5)}, f32[256]{0}, u32[]) copy-start(%x)\n"
      "  ROOT %d = f32[256]{0:S(5)} copy-done(%s)"
    ),
    {},
  )
  assert (kernel.name, kernel.traffic_bytes) == ("s", 2048)
