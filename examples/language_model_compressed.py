"""Trains a small GPT-2 on bytes, as Hugging Face's `run_clm` scripts do.

  python -m examples.language_model_compressed --steps=200

Without `--train_file` the text is made here. The workers are CPU devices that
this process emulates.
"""

import argparse
import math
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxmotion
from jaxmotion import bind_mesh, codecs, exchange


class Block(nn.Module):
  """Attention and a perceptron, each behind a layer norm."""

  config: argparse.Namespace

  @nn.compact
  def __call__(self, x, deterministic):
    config = self.config
    mask = nn.make_causal_mask(x[..., 0])
    h = nn.MultiHeadDotProductAttention(config.n_head, use_bias=False)(
      nn.LayerNorm()(x), mask=mask
    )
    x = x + nn.Dropout(config.dropout)(h, deterministic)
    h = nn.gelu(nn.Dense(4 * config.n_embd)(nn.LayerNorm()(x)))
    h = nn.Dense(config.n_embd)(h)
    return x + nn.Dropout(config.dropout)(h, deterministic)


class LanguageModel(nn.Module):
  """A decoder over bytes, whose logits use the embedding again."""

  config: argparse.Namespace

  @nn.compact
  def __call__(self, input_ids, deterministic=True):
    config = self.config
    tokens = nn.Embed(256, config.n_embd)
    places = nn.Embed(config.block_size, config.n_embd)
    x = tokens(input_ids) + places(jnp.arange(input_ids.shape[1]))[None]
    for _ in range(config.n_layer):
      x = Block(config)(x, deterministic)
    return tokens.attend(nn.LayerNorm()(x))


class TrainState(train_state.TrainState):
  """Parameters, optimizer state and the key of dropout."""

  dropout_rng: jax.Array


def load_text(config):
  if config.train_file:
    return np.frombuffer(pathlib.Path(config.train_file).read_bytes(), np.uint8)
  words = [b"the ", b"cat ", b"dog ", b"sees ", b"hears ", b"a ", b"bird. "]
  picks = np.random.default_rng(0).integers(0, len(words), 4000)
  return np.frombuffer(b"".join(words[i] for i in picks), np.uint8)


def make_batches(config):
  """Yields blocks of text from random places."""
  text = load_text(config).astype(np.int32)
  rng = np.random.default_rng(config.seed)
  for _ in range(config.steps):
    starts = rng.integers(0, len(text) - config.block_size, config.batch_size)
    yield {"input_ids": text[starts[:, None] + np.arange(config.block_size)]}


def cross_entropy(logits, input_ids):
  losses = optax.softmax_cross_entropy_with_integer_labels(
    logits[:, :-1], input_ids[:, 1:]
  )
  return losses.mean()


def train(batches, config):
  mesh = config.mesh
  model = LanguageModel(config)
  warmup_steps = int(config.warmup_ratio * config.steps)
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, config.learning_rate, warmup_steps, config.steps
  )
  tx = optax.adamw(schedule, weight_decay=config.weight_decay)
  tx = bind_mesh(optax.chain(exchange("data", config.codec), tx), mesh)
  rng, dropout_rng = jax.random.split(jax.random.key(config.seed))
  ids = jnp.zeros((1, config.block_size), jnp.int32)
  state = TrainState.create(
    apply_fn=model.apply,
    params=jax.jit(model.init)(rng, ids)["params"],
    tx=tx,
    dropout_rng=dropout_rng,
  )

  @jax.jit
  def train_step(state, batch):
    dropout_rng, new_dropout_rng = jax.random.split(state.dropout_rng)

    def compute_loss(params):
      logits = state.apply_fn(
        {"params": params},
        batch["input_ids"],
        deterministic=False,
        rngs={"dropout": dropout_rng},
      )
      return cross_entropy(logits, batch["input_ids"])

    loss, grads = jaxmotion.value_and_grad(compute_loss)(state.params)
    state = state.apply_gradients(grads=grads, dropout_rng=new_dropout_rng)
    return state, {"loss": loss, "learning_rate": schedule(state.step)}

  losses = []
  for step, batch in enumerate(batches):
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    state, metrics = train_step(state, batch)
    losses.append(float(metrics["loss"]))
    if (step + 1) % config.logging_steps == 0:
      loss = np.mean(losses[-config.logging_steps :])
      print(f"step {step + 1}: perplexity {math.exp(loss):.2f}")
  return state.params, losses


def parse_arguments(argv=None):
  parser = argparse.ArgumentParser()
  parser.add_argument("--train_file")
  for name, default in {
    **{"seed": 0, "steps": 200, "batch_size": 16, "block_size": 64},
    **{"n_layer": 2, "n_head": 4, "n_embd": 64, "dropout": 0.1},
    **{"learning_rate": 3e-3, "warmup_ratio": 0.1, "weight_decay": 0.01},
    **{"logging_steps": 20},
  }.items():
    parser.add_argument(f"--{name}", type=type(default), default=default)
  return parser.parse_args(argv)


def main():
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 4)
  config = parse_arguments()
  config.mesh = jax.sharding.Mesh(jax.devices(), ("data",))
  config.codec = codecs.feedback(codecs.uniform(bits=8))
  train(make_batches(config), config)


if __name__ == "__main__":
  main()
