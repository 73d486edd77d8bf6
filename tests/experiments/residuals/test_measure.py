import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from experiments import gpu_compile
from jaxmotion import memory, perfmodel, program

WIDTH, REPEATS = 128, 24


def _block(kernel, x):
  layout = ("NHWC", "HWIO", "NHWC")
  y = lax.conv_general_dilated(
    x, kernel, (1, 1), "SAME", dimension_numbers=layout
  )
  return x + jnp.tanh(y)


def _loss(x, y):
  return jnp.mean((x - y) ** 2)


pytestmark = pytest.mark.skipif(
  gpu_compile.explain_refusal() is not None, reason="cannot be compiled"
)


def test_an_update_in_the_backward_pass_holds_no_copy_of_the_kernels():
  model = memory.OptimizerInBackward(
    [(_block, REPEATS)], _loss, optax.sgd(0.1), segment=1
  )
  kernels = jax.ShapeDtypeStruct((REPEATS, 3, 3, WIDTH, WIDTH), "float32")
  x = jax.ShapeDtypeStruct((2, 4, 4, WIDTH), "float32")
  state = jax.eval_shape(model.init, [kernels])
  needs = gpu_compile.compile_memory(
    model.step, [kernels], state, x, x, donate_argnums=(0, 1)
  )
  assert needs.alias_size_in_bytes == kernels.size * 4
  assert needs.temp_size_in_bytes < needs.alias_size_in_bytes / 2


def _dense(params, x):
  return x + jax.nn.gelu(x @ params["up"]) @ params["down"]


def test_offloaded_residuals_leave_the_device_with_a_loop_and_without():
  dense = memory.compress_residuals(_dense, memory.offload())
  like = jax.ShapeDtypeStruct
  blocks = [
    {"up": like((512, 2048), "float32"), "down": like((2048, 512), "float32")}
  ] * 8

  def loss(params, x):
    for own in params:
      x = dense(own, x)
    return jnp.mean(x**2)

  x = like((8192, 512), "float32")
  needs = gpu_compile.compile_memory(jax.grad(loss), blocks, x)
  kept = 8 * (512 + 2048) * 8192 * 4
  assert needs.host_temp_size_in_bytes == kept
  assert needs.temp_size_in_bytes < kept / 1.5

  def scan_dense(params, x):
    run = lambda x, own: (_dense(own, x), None)
    return jnp.mean(lax.scan(run, x, params)[0])

  scanned = memory.compress_residuals(
    scan_dense, memory.offload(), params=(0, 1)
  )
  stack = {
    "up": like((24, 512, 2048), "float32"),
    "down": like((24, 2048, 512), "float32"),
  }
  needs = gpu_compile.compile_memory(
    jax.grad(scanned), stack, like((4096, 512), "float32")
  )
  kept = 24 * (512 + 2048) * 4096 * 4
  assert kept <= needs.host_temp_size_in_bytes < 1.1 * kept
  assert needs.temp_size_in_bytes < kept / 3


def test_predicted_memory_of_loops_that_are_written_out_is_the_compilers():
  """XLA makes what loops begin with for all of them at once."""

  def run(*arrays):
    total = 0.0
    for x in arrays:
      first = jnp.zeros((x.shape[1], x.shape[1]))
      products, rows = lax.scan(
        lambda total, row: (total + jnp.outer(row, row), 2 * row), first, x
      )
      y = rows @ products
      total += jnp.sum(y @ y.T)
    return total

  arrays = [jax.ShapeDtypeStruct((1024, 1024), "float32")] * 4
  predicted = perfmodel.predict_cost(run, *arrays).peak_bytes
  compiled = program.device_bytes(gpu_compile.compile_memory(run, *arrays))
  assert abs(predicted - compiled) < 0.05 * compiled
