import re
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxmotion.core import _compat
from jaxmotion.kernels import _dispatch, blocks
from jaxmotion.kernels._dispatch import dispatch
from jaxmotion.kernels.quantize import AbsmaxOp
from tests.kernels.lowering import kernel_calls

OP = AbsmaxOp(bits=8, block=32)
X = jnp.ones((16, 64))


def encode(x, **options):
  return blocks.encode(OP, x, **options)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_hosts_run_the_reference_and_gpus_the_kernel(has_gpu, monkeypatch):
  own = {"cpu", "cuda"} if has_gpu else {"cpu"}
  monkeypatch.setattr(_compat, "_own_platforms", lambda: own)
  # A program for an absent GPU runs its kernel as well.
  assert kernel_calls(encode, X) == 1
  assert "triton" not in jax.jit(lambda x: encode(x)).lower(X).as_text()
  # A kernel refuses an array of one block.
  assert kernel_calls(encode, jnp.ones(20)) == 0


def test_the_environment_is_tried_first_unless_an_argument_is_given(
  monkeypatch,
):
  monkeypatch.setenv(_dispatch.VARIABLE, "pallas_triton")
  assert kernel_calls(encode, X) == 1
  assert kernel_calls(encode, jnp.ones(20)) == 0
  fn = lambda x: encode(x, implementation="reference")
  assert kernel_calls(fn, X) == 0
  monkeypatch.setenv(_dispatch.VARIABLE, "reference")
  assert kernel_calls(encode, X) == 0


def test_failures_are_reported_with_their_reasons():
  with pytest.raises(NotImplementedError, match=r"pallas_triton: .*one block"):
    encode(jnp.ones(20), implementation="pallas_triton")


def test_misspelt_names_are_refused(monkeypatch):
  with pytest.raises(ValueError, match=r"`implementation` must be one of"):
    encode(X, implementation="pallas")
  monkeypatch.setenv(_dispatch.VARIABLE, "triton")
  with pytest.raises(ValueError, match=r"`JAXMOTION_KERNELS` must be one of"):
    encode(X)


def make_table(*names):
  """Returns implementations whose `double` returns its name and arguments."""
  return {
    name: SimpleNamespace(double=lambda x, *, times, own=name: (own, x, times))
    for name in names
  }


def refuse(x, *, times):
  raise NotImplementedError(f"no {x} times {times}")


def test_arrays_and_configuration_reach_the_implementation():
  table = make_table("reference", "pallas_triton")
  assert dispatch(table, "double", 3, times=2) == ("reference", 3, 2)
  found = dispatch(table, "double", 3, implementation="pallas_triton", times=2)
  assert found == ("pallas_triton", 3, 2)


def test_an_op_without_the_forced_kernel_runs_its_reference(monkeypatch):
  monkeypatch.setenv(_dispatch.VARIABLE, "pallas_triton")
  for table in (
    make_table("reference"),
    {**make_table("reference"), "pallas_triton": SimpleNamespace()},
  ):
    assert dispatch(table, "double", 3, times=2)[0] == "reference"
    with pytest.raises(NotImplementedError, match="double .*: there is none"):
      dispatch(table, "double", 3, implementation="pallas_triton", times=2)


def test_the_error_has_the_reason_of_every_implementation(monkeypatch):
  monkeypatch.setenv(_dispatch.VARIABLE, "pallas_triton")
  own = SimpleNamespace(refuse=refuse)
  table = {"reference": own, "pallas_triton": own}
  with pytest.raises(
    NotImplementedError,
    match=r"^refuse has .*: pallas_triton: no 3 times 2; reference: no 3",
  ):
    dispatch(table, "refuse", 3, times=2)


def test_hosts_never_import_pallas(monkeypatch):
  # An import would raise ImportError.
  monkeypatch.setitem(sys.modules, "jax.experimental.pallas", None)
  encode(jnp.ones((3, 40)))


def trace_encoders(*shapes, kind="NVIDIA H200"):
  """Returns a program that encodes arrays of these shapes on such a device."""
  device = AbstractDevice(kind, None, "gpu")
  mesh = AbstractMesh((1,), ("x",), abstract_device=device)
  like = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
  with jax.sharding.use_abstract_mesh(mesh):
    return str(jax.make_jaxpr(lambda *xs: [encode(x) for x in xs])(*like))


def test_a_mesh_of_gpus_leaves_the_reference_untraced(monkeypatch):
  monkeypatch.setattr(_compat, "_own_platforms", lambda: {"cpu", "cuda"})
  program = trace_encoders((16, 64))
  assert "pallas_call" in program and "cond" not in program
  # A tile is the only function that is traced.
  assert re.findall(r"jit\[\s*name=(\w+)", program) == ["_trace_tile"]
  other = trace_encoders((16, 64), kind="AMD Instinct MI300X")
  assert "pallas_call" not in other
  like = jax.ShapeDtypeStruct((16, 64), "float32")
  assert "cond" in str(jax.make_jaxpr(encode)(like))


def test_arrays_of_many_shapes_are_encoded_by_one_trace(monkeypatch):
  # From JAX 0.12 on, what is traced in a kernel is kept for its grid alone.
  kernels = 3 if jax.__version_info__ >= (0, 12) else 1
  calls = []

  class Counted(AbsmaxOp):
    def encode(self, x, key):
      calls.append("reference")
      return super().encode(x, key)

    def encode_tile(self, x, tile, seed):
      calls.append("kernel")
      return super().encode_tile(x, tile, seed)

  monkeypatch.setattr(sys.modules[__name__], "OP", Counted(bits=8, block=32))
  shapes = [(16 * n, 512) for n in (1, 2, 3)]
  assert trace_encoders(*shapes).count("pallas_call") == 3
  assert sorted(calls) == ["kernel"] * kernels + ["reference"]
