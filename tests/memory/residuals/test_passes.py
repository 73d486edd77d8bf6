"""Order of the two passes, held by barriers, as traced."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxmotion import codecs
from jaxmotion.memory import (
  compress_residuals,
  offload,
  recompute,
  residuals_of,
)
from jaxmotion.memory._memory_kind import is_on_host
from jaxmotion.memory.residuals._traced import Passes
from jaxmotion.memory.residuals.choose import make_options

INT8 = codecs.uniform(bits=8, block=64)
W = jax.ShapeDtypeStruct((3, 64, 64), "float32")
X = jax.ShapeDtypeStruct((256, 64), "float32")


def mlp(w, x):
  for i in range(3):
    x = jnp.tanh(x @ w[i])
  return x


def normalized(w, x):
  y = x @ w[0]
  y = y - jnp.mean(y, 0, keepdims=True)
  return y * lax.rsqrt(jnp.mean(y**2, 0, keepdims=True) + 1e-3)


def pool(y):
  window = (1, 2, 2, 1)
  y = y.reshape(4, 8, 8, 64)
  return lax.reduce_window(y, -jnp.inf, lax.max, window, window, "VALID")


def pooled(w, x):
  return pool(x @ w[0])


def attention(w, x):
  q, k, v = (x @ w[i] for i in range(3))
  scores = jnp.exp(q @ k.T)
  return x + jnp.tanh((scores / jnp.sum(scores, 1, keepdims=True)) @ v)


def loss(block, codec=None, memory_budget=None):
  block = compress_residuals(block, codec, memory_budget=memory_budget)
  return lambda w, x: jnp.sum(jnp.square(block(w, x)))


def equations(fn, *args):
  """Returns all equations of a traced function, those of its calls included."""
  found = []

  def walk(jaxpr):
    for eqn in jaxpr.eqns:
      inner = [p for p in eqn.params.values() if hasattr(p, "jaxpr")]
      if eqn.primitive.name in ("jit", "pjit", "closed_call"):
        walk(inner[0].jaxpr)
      else:
        found.append(eqn)

  walk(jax.make_jaxpr(fn)(*args).jaxpr)
  return found


def makers(eqns):
  """Returns the equation that makes each value."""
  return {v: e for e in eqns for v in e.outvars}


def arrays(eqn):
  """Returns the operands of an equation that are no literals."""
  return [v for v in eqn.invars if not hasattr(v, "val")]


def ops(eqns, *names):
  return [e for e in eqns if e.primitive.name in names]


def barriers(eqns):
  return ops(eqns, "optimization_barrier")


def test_gradients_of_weights_are_finished_before_the_next_decoding():
  eqns = equations(jax.grad(loss(mlp, INT8)), W, X)
  matmuls = ops(eqns, "dot_general")
  tied = {id(v) for e in barriers(eqns) for v in e.invars}
  # Three of the forward pass, two for each of them in the backward pass; but
  # nothing asks for the gradient of the input.
  assert len(matmuls) == 3 + 5
  weights = [e for e in matmuls if e.outvars[0].aval.shape == (64, 64)]
  late = [e for e in weights if id(e.outvars[0]) not in tied]
  assert len(weights) == 3
  assert len(late) <= 1  # The last gradient of all is a result.


def skipping(w, x):
  first = jnp.tanh(x @ w[0])
  y = first
  for _ in range(4):
    y = jnp.tanh(y @ w[1])
  joined = jnp.tanh(jnp.concatenate([y, first], -1))
  return joined[:, :64] + joined[:, 64:] @ w[2]


def test_the_gradient_of_a_skip_connection_is_written_when_it_is_made():
  eqns = equations(jax.grad(loss(skipping)), W, X)
  tied = {v for e in barriers(eqns) for v in arrays(e)}
  parts = [v for e in ops(eqns, "split") for v in e.outvars]
  # The gradient of the concatenation: its first part is read at once.
  assert [v in tied for v in parts] == [False, True]


def test_no_barrier_ties_a_broadcast():
  eqns = equations(jax.grad(loss(normalized, INT8)), W, X)
  made = makers(eqns)
  waiting = [made[v] for e in barriers(eqns) for v in arrays(e) if v in made]
  assert waiting
  assert not [
    e
    for e in waiting
    if e.primitive.name == "broadcast_in_dim"
    and e.outvars[0].aval.size > e.invars[0].aval.size
  ]


def test_the_result_waits_for_its_encoded_residual():
  eqns = equations(lambda w, x: jax.vjp(loss(pooled), w, x), W, X)
  made = makers(eqns)
  (square,) = ops(eqns, "square")
  source = made[square.invars[0]]
  assert source.primitive.name == "optimization_barrier"
  # Beside the result: the argmax of each window, in words.
  assert any(v.aval.dtype == jnp.uint32 for v in source.invars)


def test_equality_of_floats_is_evaluated_once():
  def block(w, x):
    return jnp.max(jnp.exp(x @ w[0]), axis=0)

  kinds = {r.name.split("_")[0] for r in residuals_of(block, W, X)}
  assert "mask/eq" in kinds


def test_recomputed_values_are_saved_until_their_last_use():
  everything = [("^(?!.*/1$)", recompute())]

  def count(name, fn, least=X.shape[0] ** 2):
    found = ops(equations(fn, W, X), name)
    return sum(e.outvars[0].aval.size >= least for e in found)

  def total(w, x):
    return jnp.sum(jnp.square(attention(w, x)))

  plain = jax.grad(total, (0, 1))
  ours = jax.grad(loss(attention, everything), (0, 1))
  # The scores, which three steps read and which follow from a matmul.
  assert (count("exp", plain), count("exp", ours)) == (1, 2)
  # All five matmuls of the forward pass.
  assert count("dot_general", ours, 0) == count("dot_general", plain, 0) + 5


def test_all_cheap_results_of_a_recomputed_matmul_are_computed_at_once():
  """A ReLU mask and the argmax of max pooling: one is needed much later."""

  def block(w, x):
    return pool(jax.nn.relu(x @ w[0]))

  eqns = equations(jax.grad(loss(block, memory_budget=0.0), (0, 1)), W, X)
  first, again, *_ = ops(eqns, "dot_general")
  assert first.params == again.params
  uses = [i for i, e in enumerate(eqns) if again.outvars[0] in e.invars]
  # The packed argmax is unpacked after that.
  names = [e.primitive.name for e in eqns[eqns.index(again) :]]
  assert max(uses) < eqns.index(again) + names.index("shift_right_logical")


def test_no_step_runs_before_earlier_transfers_to_the_host_are_done():
  codec = offload(INT8)
  eqns = equations(jax.grad(loss(mlp, codec)), W, X)
  saved = residuals_of(mlp, W, X, codec=codec)
  moved = [e.outvars[0] for e in ops(eqns, "device_put")]
  sent = {v for v in moved if is_on_host(v.aval)}
  assert len(sent) == sum(len(r.coder.likes) for r in saved) > 0
  assert sent <= {v for e in barriers(eqns) for v in arrays(e)}


def half_attention(w, x):
  """Attention in bfloat16, softmax in float32, with narrow values."""
  w, x = w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
  q, k, v = x @ w[0], x @ w[1], (x @ w[2])[:, :48]
  shares = jax.nn.softmax((q @ k.T).astype(jnp.float32)).astype(x.dtype)
  return x + jnp.pad(shares @ v, ((0, 0), (0, 16)))


def test_gradients_of_an_attention_write_nothing_that_a_fusion_would_not():
  eqns = equations(jax.grad(loss(half_attention, memory_budget=0)), W, X)
  tied = [v.aval for e in barriers(eqns) for v in e.invars]
  assert "float32[256,256]" not in [a.str_short() for a in tied]
  shapes = [e.outvars[0].aval.shape for e in ops(eqns, "dot_general")]

  def last(*shape):
    return max(i for i, found in enumerate(shapes) if found == shape)

  # The gradient of the values needs the probabilities, that of the
  # probabilities is as large: both at a time would be one array too many.
  assert last(48, 256) < last(256, 256)


def test_no_barrier_stands_between_a_product_and_its_readers():
  """A compiler writes a fusion's result over an operand that it reads last."""
  eqns = equations(jax.grad(loss(mlp)), W, X)
  products = {v for e in ops(eqns, "dot_general") for v in e.outvars}
  behind = set()
  for e in barriers(eqns):
    pairs = zip(e.invars, e.outvars, strict=True)
    behind |= {out for v, out in pairs if v in arrays(e) and v in products}
  assert behind
  cheap = ops(eqns, "tanh", "mul", "square")
  reads = {v for e in cheap for v in arrays(e)}
  assert reads and not reads & behind


def gated(w, x):
  return x + (jax.nn.silu(x @ w[0]) * (x @ w[1])) @ w[2]


def named(w, x):
  return x + jax.nn.silu(checkpoint_name(x @ w[0], "up")) @ w[1]


def find_product(eqns, value):
  """Returns the matmul whose result a value is, in other words or not."""
  source = {}
  for e in ops(eqns, "jit", "pjit", "name"):
    if len(e.invars) == 1:
      source[e.outvars[0]] = e.invars[0]
  while value in source:
    value = source[value]
  made = makers(eqns).get(value)
  return made is not None and made.primitive.name == "dot_general"


@pytest.mark.parametrize("block", [gated, named])
def test_fusions_read_saved_products_without_a_barrier_in_between(block):
  """A zero passes the barrier instead, and changes no bit of the product."""
  eqns = jax.make_jaxpr(jax.grad(loss(block)))(W, X).jaxpr.eqns
  masked = ops(eqns, "or")
  tied = [v for e in barriers(eqns) for v in arrays(e)]
  words = [v for v in tied if v.aval.dtype == jnp.uint32]
  assert masked
  assert all(find_product(eqns, e.invars[0]) for e in masked)
  assert not [v for v in words if find_product(eqns, v)]


def test_the_gradient_that_frees_a_factor_runs_first():
  eqns = jax.make_jaxpr(jax.grad(loss(gated)))(W, X).jaxpr.eqns
  made = makers(eqns)

  def name_operands(eqn):
    """Returns what made the operands, whatever barrier they passed."""
    found = [(v, made[v]) for v in eqn.invars if v in made]
    return {
      made[e.invars[e.outvars.index(v)]].primitive.name
      if e in barriers(eqns)
      else e.primitive.name
      for v, e in found
    }

  products = ops(eqns, "dot_general")
  weights = [e for e in products if e.outvars[0].aval.shape == (64, 64)]
  # That of the gate follows from both factors, that of the other from one.
  sums = ["add_any" in name_operands(e) for e in weights]
  assert sums == [False, True, False]


def test_nothing_waits_where_the_forward_pass_is_not_repeated():
  activated = compress_residuals(lambda w, x: jnp.tanh(x @ w[0]))

  def step(w, x):
    return jnp.sum(jnp.tanh(activated(w, x)))

  eqns = jax.make_jaxpr(jax.grad(step))(W, X).jaxpr.eqns
  assert not barriers(eqns)
  assert not ops(eqns, "or")


def test_a_function_that_a_loop_repeats_saves_fewer_bytes_each_time():
  w = jax.ShapeDtypeStruct((8, 64, 64), "float32")

  def stack(w, x):
    for i in range(8):
      x = x + jnp.tanh(x @ w[i])
    return x

  def saved_bytes(repeats):
    passes = Passes(stack, (w, X), make_options(None, 0.0), repeats)
    _, buffers = jax.eval_shape(passes.forward, w, X)
    return sum(b.size * b.dtype.itemsize for b in jax.tree.leaves(buffers))

  # Once, inputs of some layers spare memory. Of 100 times they would fill it.
  assert saved_bytes(100) < saved_bytes(1)
