"""Tunes low-rank adapters of a frozen decoder with NNX, in Tunix's style."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

MESH = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))


class Decoder(nnx.Module):
  def __init__(self, rngs):
    def make_layer(size, out):
      base = nnx.Linear(size, out, rngs=rngs)
      return nnx.LoRA(size, 4, out, base_module=base, rngs=rngs)

    self.embed = nnx.Embed(32, 16, rngs=rngs)
    self.up, self.down = make_layer(16, 32), make_layer(32, 16)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)

  def __call__(self, tokens):
    x = self.embed(tokens)
    x = x + self.down(self.dropout(nnx.gelu(self.up(x))))
    return self.embed.attend(x)


def loss_fn(model, input_tokens, input_mask):
  logits = model(input_tokens)[:, :-1]
  mask = input_mask[:, 1:]
  one_hot = jax.nn.one_hot(input_tokens[:, 1:], 32) * mask[..., None]
  loss = -jnp.sum(jax.nn.log_softmax(logits) * one_hot)
  return loss / (jnp.sum(mask) + 1e-8), {"tokens": jnp.sum(mask)}


def train(steps):
  tx = optax.sgd(0.3, momentum=0.9)

  @nnx.jit
  def train_step(model, optimizer, batch):
    tuned = nnx.DiffState(0, nnx.LoRAParam)
    grad_fn = nnx.value_and_grad(loss_fn, argnums=tuned, has_aux=True)
    (loss, aux), grads = grad_fn(model, **batch)
    optimizer.update(model, grads)
    return {"loss": loss, **aux}

  with jax.set_mesh(MESH):
    model = Decoder(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
    rng, log = np.random.default_rng(0), []
    for _ in range(steps):
      tokens = (rng.integers(0, 32, (8, 1)) + 3 * np.arange(12)) % 32
      mask = (np.arange(12) < rng.integers(4, 13, (8, 1))).astype(np.float32)
      batch = {"input_tokens": tokens, "input_mask": mask}
      batch = jax.device_put(batch, NamedSharding(MESH, P("data")))
      log.append(jax.device_get(train_step(model, optimizer, batch)))
  return nnx.state(model, nnx.LoRAParam), log
