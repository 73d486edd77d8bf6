import jax
import jax.numpy as jnp
import pytest

from jaxmotion import perfmodel
from jaxmotion.perfmodel import (
  Kernel,
  gbyte_per_s,
  predict_cost,
  predict_seconds,
)
from jaxmotion.perfmodel.extend import kernel_seconds, predict_ready_seconds

DEVICE = perfmodel.Device(
  name="round numbers",
  matmul_flops_per_s={"float32": 1e12, "bfloat16": 2e12},
  vector_flops_per_s=1e11,
  memory_rate=gbyte_per_s(100),
  memory_bytes=1e9,
  kernel_s=1e-6,
)
X = jax.ShapeDtypeStruct((512, 512), "float32")


def loss(w, x):
  return jnp.sum(jax.nn.relu(x @ w) ** 2)


STEP = predict_cost(jax.value_and_grad(loss), X, X)


def test_a_kernel_takes_the_longer_of_its_flops_and_bytes():
  for kernel, seconds in (
    (Kernel("matmul", "float32", 1e12, 1e3), 1 + 1e-6),
    (Kernel("matmul", "bfloat16", 1e12, 1e3), 0.5 + 1e-6),
    (Kernel("elementwise", "int8", 1e11, 1e3, 3), 3 + 3e-6),
    (Kernel("reduction", "float32", 1e3, 1e11), 1 + 1e-6),
  ):
    assert kernel_seconds(kernel, DEVICE) == pytest.approx(seconds)


def test_a_cost_takes_the_seconds_of_its_kernels_at_a_rate_of_their_dtype():
  each = [kernel_seconds(k, DEVICE) for k in STEP.kernels]
  assert predict_seconds(STEP, DEVICE) == pytest.approx(sum(each))
  ready = predict_ready_seconds(STEP, DEVICE)
  assert ready[1] == pytest.approx(predict_seconds(STEP, DEVICE))
  assert 0 < ready[0] < ready[1]
  half = predict_cost(lambda x: x @ x, jax.ShapeDtypeStruct((8, 8), "float16"))
  with pytest.raises(ValueError, match=r"a rate for 'float16', got only"):
    predict_seconds(half, DEVICE)
