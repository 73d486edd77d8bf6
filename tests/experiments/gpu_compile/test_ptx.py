import pytest

from experiments.gpu_compile import ptx

TEXT = """
.version 8.8
.target sm_90a
.address_size 64

.visible .entry scale(
\t.param .u64 .ptr .align 16 scale_param_0,
\t.param .u64 .ptr .align 16 scale_param_1
)
.reqntid 64, 2, 1
{
\t.reg .b32 \t%r<9>;
\t.reg .b64 \t%rd<6>;
\t.shared .align 4 .b8 tile[1024];
\tld.param.b64 \t%rd1, [scale_param_0];
\tld.param.b64 \t%rd2, [scale_param_1];
\tcvta.to.global.u64 \t%rd3, %rd1;
\tcvta.to.global.u64 \t%rd4, %rd2;
\tld.global.nc.v4.b32 \t{%r1, %r2, %r3, %r4}, [%rd3];
\tld.global.L1::evict_last.b32 \t%r5, [%rd3+16];
\tst.global.v2.b32 \t[%rd4], {%r1, %r2};
\tst.global.v2.b32 \t[%rd4+8], {%r3, %r5};
\tst.global.b8 \t[%rd4+16], %r4;
\tret;
}
"""


@pytest.fixture
def write(tmp_path):
  def make(text):
    path = tmp_path / "kernel.ptx"
    path.write_text(text)
    return path

  return make


def test_widths_threads_and_shared_memory_are_read(write, monkeypatch):
  monkeypatch.setattr(ptx, "_find_ptxas", lambda: None)
  found = ptx.read_assembly(write(TEXT), "fusion.1", 512)
  assert (found.name, found.instruction) == ("scale", "fusion.1")
  assert (found.threads, found.shared_bytes) == (128, 1536)
  assert found.loads == {4: 1, 16: 1}
  assert found.stores == {1: 1, 8: 2}
  assert found.registers is found.spill_bytes is found.occupancy is None
  # Accesses that name no memory are counted.
  found = ptx.read_assembly(write(TEXT.replace(".global.nc", "")), "", 0)
  assert found.loads == {4: 1, 16: 1}
  # A file holds one kernel or none.
  assert ptx.kernel_name(write(TEXT)) == "scale"
  assert ptx.kernel_name(write(".version 8.8\n")) is None


@pytest.mark.skipif(ptx._find_ptxas() is None, reason="there is no ptxas")
def test_the_assembler_tells_registers_and_spills(write):
  found = ptx.read_assembly(write(TEXT), "fusion", 0)
  assert found.registers is not None
  assert 8 <= found.registers <= 32
  assert found.spill_bytes == 0
  assert found.occupancy == 1.0
  # What the assembler refuses is an error.
  with pytest.raises(RuntimeError, match="ptxas"):
    ptx.read_assembly(write(TEXT.replace("ret;", "return;")), "", 0)


@pytest.mark.parametrize(
  ("threads", "registers", "shared_bytes", "occupancy"),
  [
    (256, 32, 0, 1.0),
    (256, 33, 0, 0.75),
    (1024, 64, 0, 0.5),
    (32, 16, 0, 0.5),
    (128, 16, 100_000, 0.125),
  ],
)
def test_occupancy_is_what_threads_registers_and_memory_allow(
  threads, registers, shared_bytes, occupancy
):
  found = ptx.Assembly("k", "", threads, shared_bytes, {}, {}, registers, 0)
  assert found.occupancy == occupancy
