import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion.memory.residuals.trace import trace_joint
from jaxmotion.program import evaluate, read_operand


def test_integer_arguments_are_held_fixed():
  x, n = jnp.arange(3.0), jnp.arange(3)
  ct = jnp.full(3, 2.0)

  def fn(n, x, y):
    return [n * x * y, n + 1], {"note": x.sum()}

  args = (n, x, 2 * x)
  outs = [jax.typeof(y) for y in fn(*args)[0]]
  joint = trace_joint(fn, args, outs)
  of_n, of_x, of_y = joint.gradients
  assert of_n is None and len(joint.cotangents) == 1
  env = dict(joint.program.constants)
  env.update(zip(joint.program.inputs, (*args, ct), strict=True))
  evaluate(joint.program.steps, env)
  product, counts = (read_operand(env, v) for v in joint.outputs)
  np.testing.assert_array_equal(product, n * x * 2 * x)
  np.testing.assert_array_equal(counts, n + 1)
  assert float(read_operand(env, joint.diagnostics["note"])) == 3
  np.testing.assert_array_equal(read_operand(env, of_x), ct * n * 2 * x)
  np.testing.assert_array_equal(read_operand(env, of_y), ct * n * x)
