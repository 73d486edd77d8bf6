"""Updates within the backward pass against plain training."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxmotion import codecs
from jaxmotion.memory import OptimizerInBackward, offload
from tests.memory.residuals.nets import distance, make, normal, stacked

ADAM, SGD = optax.adam(1e-2), optax.sgd(0.1)
BLOCK, OWN, X = make("mlp")
Y = normal(9, 256, 4)


def head(w, x):
  return x @ w


def loss(x, y):
  return jnp.mean((x - y) ** 2)


def make_blocks(repeats):
  params = [normal(5, 16, 16), stacked(OWN, repeats), normal(6, 16, 4)]
  return [(head, 1), (BLOCK, repeats), (head, 1)], params


class Plain:
  """Trains the blocks at once, by the interface of `OptimizerInBackward`."""

  def __init__(self, tx):
    self.tx, self.init = tx, tx.init

  def step(self, params, state, x, y):
    def total(params):
      z = head(params[0], x)
      z, _ = jax.lax.scan(lambda z, p: (BLOCK(p, z), None), z, params[1])
      return loss(head(params[2], z), y)

    value, grads = jax.value_and_grad(total)(params)
    updates, state = self.tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def train(model, params, steps):
  step = jax.jit(model.step)
  state = model.init(params)
  for _ in range(steps):
    params, state, value = step(params, state, X, Y)
  return params, value


@pytest.mark.parametrize(("repeats", "segment"), [(4, None), (5, 2), (3, 8)])
def test_it_matches_plain_training(repeats, segment):
  blocks, params = make_blocks(repeats)
  model = OptimizerInBackward(blocks, loss, ADAM, segment=segment)
  found, value = train(model, params, 3)
  expected, last = train(Plain(ADAM), params, 3)
  assert distance(expected, found) < 1e-4
  assert abs(value - last) < 1e-5 * last


def test_residuals_may_be_quantized_and_on_the_host():
  blocks, params = make_blocks(4)
  int8 = offload(codecs.uniform(bits=8, block=128))
  model = OptimizerInBackward(blocks, loss, SGD, codec=int8, segment=2)
  found, value = train(model, params, 2)
  expected, last = train(Plain(SGD), params, 2)
  assert 0 < distance(expected, found) < 0.01
  assert abs(value - last) < 0.01 * last


def test_the_gradients_of_a_loop_never_exist_together():
  blocks, params = make_blocks(64)
  x, y = X[:8], Y[:8]  # Few examples: the parameters are most of the memory.

  def temp_bytes(model):
    args = params, model.init(params), x, y
    lowered = jax.jit(model.step, donate_argnums=(0, 1)).lower(*args)
    return lowered.compile().memory_analysis().temp_size_in_bytes

  weights = sum(a.nbytes for a in jax.tree.leaves(params))
  assert temp_bytes(Plain(SGD)) > weights
  assert temp_bytes(OptimizerInBackward(blocks, loss, SGD)) < 0.9 * weights


def test_parameters_and_repeats_of_no_blocks_are_refused():
  with pytest.raises(ValueError, match="`params` must be 1 trees"):
    OptimizerInBackward([(head, 1)], loss, SGD).init([])
  with pytest.raises(ValueError, match=r"`blocks\[0\]\[1\]` .* an integer"):
    OptimizerInBackward([(head, 0)], loss, SGD)


class TestRefusedSteps:
  """Steps that would train other parameters than those that were given."""

  def refuse(self, match, blocks, params, *, loss=loss, error=ValueError, **kw):
    model = OptimizerInBackward(blocks, loss, SGD, **kw)
    state = [SGD.init(()) for _ in params]
    with pytest.raises(error, match=match):
      jax.eval_shape(model.step, params, state, X, Y)

  @pytest.mark.parametrize(("rows", "segment"), [(2, None), (4, 2), (1, 2)])
  def test_a_stack_of_another_length(self, rows, segment):
    params = [stacked(OWN, rows)]
    match = rf"`params\[0\]` must be stacked 3 times.*got float32\[{rows},"
    self.refuse(match, [(BLOCK, 3)], params, segment=segment)
    with pytest.raises(ValueError, match=match):
      OptimizerInBackward([(BLOCK, 3)], loss, SGD).init(params)

  def test_a_scalar_in_a_stack(self):
    match = r"`params\[0\]` must be stacked 2 times.*got float32\[\] at 'b'"
    params = [{"b": jnp.float32(1), **stacked(OWN, 2)}]
    self.refuse(match, [(BLOCK, 2)], params)

  def test_integer_parameters(self):
    params = [{**OWN, "n": jnp.arange(3)}]
    match = r"`params\[0\]/n` must be a floating-point"
    self.refuse(match, [(BLOCK, 1)], params, error=TypeError)

  def test_a_state_of_other_parameters(self):
    model = OptimizerInBackward([(head, 1)], loss, ADAM)
    state = model.init([normal(0, 8, 4)])
    with pytest.raises(ValueError, match="`state` must be like that of `init`"):
      jax.eval_shape(model.step, [normal(0, 16, 4)], state, X, Y)

  def test_a_loss_that_is_no_scalar(self):
    match = "`loss` must return a floating-point scalar, got"
    for wrong in (
      lambda x, y: jnp.sum((x - y) ** 2, 1),
      lambda x, y: {"loss": jnp.sum(x)},
      lambda x, y: jnp.sum(x > y),
    ):
      self.refuse(match, [(head, 1)], [normal(6, 16, 4)], loss=wrong)

  def test_a_repeated_block_that_changes_the_shape(self):
    match = r"`blocks\[0\]` must keep the shapes of its input"
    self.refuse(match, [(head, 2)], [stacked(normal(6, 16, 4), 2)])

  def test_a_rule_that_matches_no_residual(self):
    match = "`codec` must match a residual each, got 'hiden'"
    rules = [("hiden", codecs.cast("bfloat16"))]
    blocks, params = make_blocks(2)
    self.refuse(match, blocks, params, codec=rules)
    rules = [("tanh|erf|dot_general", codecs.cast("bfloat16"))]
    model = OptimizerInBackward(blocks, loss, SGD, codec=rules)
    jax.eval_shape(model.step, params, model.init(params), X, Y)
