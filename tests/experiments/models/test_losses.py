import inspect

import jax
import jax.numpy as jnp
import pytest

from experiments.models import losses
from experiments.models.losses.attention import attend_all, attend_blocks
from tests.memory.residuals.nets import distance, normal

_SMALL = {
  "gpt": "layers=1:width=16:heads=2:batch=2:length=8",
  "resnet": "batch=1:image=32",
  "unet": "channels=8:levels=2:blocks=1:batch=1:image=8",
  "moe": "layers=1:width=16:heads=2:experts=2:batch=1:length=8",
  "ssm": "layers=1:width=8:batch=1:length=8",
  "llama": "layers=1:width=16:heads=4:groups=2:batch=1:length=8",
  "encoder_decoder": "layers=1:width=16:heads=2:batch=1:length=8",
  "lstm": "layers=1:width=8:batch=1:length=8",
  "graph": "layers=1:width=8:nodes=4:edges=8",
  "vision": "layers=1:width=16:heads=2:batch=1:image=32",
  "convnext": "blocks=1:width=8:batch=1:image=32",
}


@pytest.fixture(autouse=True)
def allow_rank_promotion():
  # The models are written as others write theirs.
  with jax.numpy_rank_promotion("allow"):
    yield


@pytest.mark.parametrize("name", [n for n in losses.TASKS if n != "resnet101"])
def test_every_loss_is_a_number_whose_blocks_can_be_wrapped(name):
  options = next(
    (o for kind, o in _SMALL.items() if name.startswith(kind)),
    "width=8:rows=4:blocks=2",
  )
  make_task = losses.parse_task(f"{name}:{options}")
  wrapped = []

  def wrap(block):
    wrapped.append(block)
    return block

  task = make_task(wrap=wrap)
  loss, grads = jax.eval_shape(
    jax.value_and_grad(task.loss_fn), task.params, task.batch
  )
  assert (loss.shape, loss.dtype) == ((), "float32")
  assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, task.params)
  assert wrapped
  assert "wrap" in inspect.signature(make_task).parameters


def test_attention_in_blocks_is_that_of_all_scores():
  q, k, v = (normal(i, 2, 256, 2, 8) for i in range(3))

  @jax.jit
  def compare(q, k, v):
    def value_and_grads(attend):
      def loss(*args):
        return jnp.sum(jnp.sin(attend(*args, lambda weights: weights)))

      return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

    return value_and_grads(attend_all), value_and_grads(attend_blocks)

  exact, found = compare(q, k, v)
  assert distance(exact, found) < 1e-5


def test_tokens_beyond_the_capacity_of_an_expert_are_dropped():
  from experiments.models.losses.experts import _route

  logits = jnp.stack([jnp.ones((1, 6)), jnp.zeros((1, 6)), -jnp.ones((1, 6))])
  route = jax.jit(lambda logits: _route(logits, slots=4))
  weight = route(jnp.moveaxis(logits, 0, -1))
  assert weight.shape == (1, 6, 3, 4)
  # Every token chooses experts 0 and 1; only four have a slot in each.
  assert (weight[0] > 0).sum((0, 2)).tolist() == [4, 4, 0]
  assert (weight[0] > 0).sum((1, 2)).tolist() == [2, 2, 2, 2, 0, 0]


def test_other_models_and_forms_are_refused():
  with pytest.raises(ValueError, match="must be some of gpt, .* got 'bert'"):
    losses.parse_task("bert")
  with pytest.raises(ValueError, match="must be NAME or NAME:OPTION=VALUE"):
    losses.parse_task("gpt:layers")
