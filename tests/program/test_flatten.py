import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxmotion import hosts
from jaxmotion.program import (
  Order,
  Value,
  array_bytes,
  evaluate,
  flatten,
  read_operand,
)

X = jnp.arange(4.0)


def trace(fn, *args):
  return flatten(jax.make_jaxpr(fn)(*args))


def names(program):
  return [step.name for step in program.steps]


@jax.custom_vjp
def double(x):
  return 2 * x


double.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct,))


def test_transparent_calls_are_written_out_and_others_stay():
  def fn(x):
    return [double(jax.jit(lambda x: jnp.sin(x) + 1)(x))]

  assert names(trace(fn, X)) == ["sin", "add", "custom_vjp_call"]


def test_a_call_that_may_not_be_inlined_stays_a_step_that_runs():
  def fn(x):
    return hosts.write_apart(lambda x: jnp.sin(x) + 1, x) * 2

  program = trace(fn, X)
  assert names(program) == ["jit", "mul"]
  env = {program.inputs[0]: X}
  evaluate(program.steps, env)
  result = read_operand(env, program.outputs[0])
  np.testing.assert_array_equal(result, fn(X))
  # What runs it again tells the compiler the same.
  again = jax.jit(lambda x: program.steps[0].run([x])[0]).lower(X).as_text()
  assert 'inlineable = "false"' in again
  jaxpr = jax.make_jaxpr(fn)(X)
  assert names(flatten(jaxpr, calls="all")) == ["sin", "add", "mul"]


def test_all_calls_are_written_out_and_unused_steps_dropped():
  def fn(x):
    jnp.cos(x)
    jax.debug.callback(lambda x: None, x)
    return double(jax.checkpoint(jnp.sin)(x)), jnp.tan(x)

  program = flatten(jax.make_jaxpr(fn)(X), calls="all", used=[True, False])
  effect, *kept = names(program)
  assert "callback" in effect and kept == ["sin", "mul"]


def test_the_branch_of_the_backend_is_written_out():
  def fn(x):
    return jax.lax.platform_dependent(x, cpu=jnp.sin, cuda=jnp.cos)

  jaxpr = jax.make_jaxpr(fn)(X)
  assert names(flatten(jaxpr, calls="all", backend="cpu"))[-1] == "sin"
  assert names(flatten(jaxpr, calls="all", backend="gpu"))[-1] == "cos"


def test_views_know_what_is_in_memory():
  program = trace(lambda x: [x.reshape(2, 2).T + 1], X)
  (x,) = program.inputs
  views = [v for s in program.steps for v in s.outs if v.source is x]
  assert len(views) == 2 and all(v.nbytes == 16 for v in views)


def test_a_shard_is_a_view_and_its_mesh_is_known():
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=auto)
  total = lambda x: jax.lax.psum(x, "data")
  mapped = jax.shard_map(total, mesh=mesh, in_specs=P("data"), out_specs=P())
  program = flatten(jax.make_jaxpr(mapped)(X), calls="all")
  (step,) = [s for s in program.steps if s.name.startswith("psum")]
  assert step.sizes == {"data": 2}
  assert step.reads[0].shape == (2,)
  assert step.reads[0].source is program.inputs[0]


def test_a_part_of_a_program_can_be_run_alone():
  constant = np.arange(4, dtype=np.float32)
  program = trace(lambda x: [jnp.sin(x), jnp.cos(x) * constant], X)
  known = dict(program.constants) | {program.inputs[0]: X}
  order = Order(program.steps)
  steps = order.leading_to(program.outputs[1:], known)
  assert {"cos", "mul"} <= {s.name for s in steps}
  assert "sin" not in {s.name for s in steps}
  evaluate(steps, known)
  found = read_operand(known, program.outputs[1])
  np.testing.assert_array_equal(found, jnp.cos(X) * constant)
  assert all(isinstance(v, Value) for v in known)


def test_values_follow_cheaply_up_to_an_expensive_step():
  program = trace(lambda x: [jnp.exp(jnp.sin(x) @ x), x], jnp.ones((3, 3)))
  order, (result, given) = Order(program.steps), program.outputs
  (product,) = (s for s in program.steps if s.name == "dot_general")
  assert order.follows_cheaply(product.reads[0], ())
  assert not order.follows_cheaply(result, ())
  assert order.follows_cheaply(result, product.outs)
  assert not order.follows_cheaply(result, (result,))
  assert not order.follows_cheaply(given, ())


def test_bytes_are_those_of_the_elements_bits():
  struct = jax.ShapeDtypeStruct
  assert array_bytes(struct((3, 5), "bfloat16")) == 30
  assert array_bytes(struct((3, 5), "int4")) == 8
  assert array_bytes(struct((3, 5), "bool")) == 15
  assert array_bytes(struct((3, 5), "float32"), frozenset([0])) == 20
