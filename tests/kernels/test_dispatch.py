import jax
import jax.numpy as jnp
import pytest

from jaxmotion.kernels import _dispatch, blocks
from jaxmotion.kernels.quantize import AbsmaxOp
from tests.kernels.triton import kernel_calls

OP = AbsmaxOp(bits=8, block=32)
X = jnp.ones((16, 64))


def encode(x, **options):
  return blocks.encode(OP, x, **options)


@pytest.fixture
def with_gpu(monkeypatch):
  monkeypatch.setattr(_dispatch, "_gpu_is_here", lambda: True)


def test_hosts_run_the_reference():
  assert "triton" not in jax.jit(lambda x: encode(x)).lower(X).as_text()


def test_gpus_run_the_preferred_kernel(with_gpu):
  assert kernel_calls(encode, X) == 1


def test_so_do_programs_for_a_gpu_that_is_not_there():
  assert kernel_calls(encode, X) == 1


def test_arrays_on_the_host_of_a_gpu_are_encoded_by_the_reference(with_gpu):
  text = jax.jit(lambda x: encode(x)).lower(X).as_text()
  assert "triton" not in text


def test_what_a_kernel_cannot_take_goes_to_the_reference(with_gpu):
  assert kernel_calls(encode, jnp.ones(20)) == 0


def test_the_environment_is_tried_first(monkeypatch):
  monkeypatch.setenv(_dispatch.VARIABLE, "pallas_triton")
  assert kernel_calls(encode, X) == 1
  assert kernel_calls(encode, jnp.ones(20)) == 0


def test_the_environment_can_ask_for_the_reference(monkeypatch, with_gpu):
  monkeypatch.setenv(_dispatch.VARIABLE, "reference")
  assert kernel_calls(encode, X) == 0


def test_the_argument_beats_the_environment(monkeypatch):
  monkeypatch.setenv(_dispatch.VARIABLE, "pallas_triton")
  fn = lambda x: encode(x, implementation="reference")
  assert kernel_calls(fn, X) == 0


def test_failures_are_reported_with_their_reasons():
  with pytest.raises(NotImplementedError, match=r"pallas_triton: .*one block"):
    encode(jnp.ones(20), implementation="pallas_triton")


def test_misspelt_names_are_refused(monkeypatch):
  with pytest.raises(ValueError, match=r"`implementation` must be one of"):
    encode(X, implementation="pallas")
  monkeypatch.setenv(_dispatch.VARIABLE, "triton")
  with pytest.raises(ValueError, match=r"`JAXMOTION_KERNELS` must be one of"):
    encode(X)
