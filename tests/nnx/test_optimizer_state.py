"""State of an exchange in `nnx.Optimizer`, as docs/checkpoint.md reads it."""

import jax
import numpy as np
import optax
from flax import nnx

import jaxmotion
import jaxmotion.nnx
from jaxmotion import checkpoint, codecs

CODEC = codecs.feedback(codecs.uniform(bits=4))


def make_trainer(workers):
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:workers]), ("data",))
  tx = optax.chain(jaxmotion.exchange("data", CODEC), optax.sgd(0.1))
  with jax.set_mesh(mesh):
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    return mesh, tx, model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def train_step(mesh, model, optimizer):
  @nnx.jit
  def step(model, optimizer, x):
    loss_fn = lambda model, x: (model(x) ** 2).mean()
    _, grads = jaxmotion.nnx.value_and_grad(loss_fn)(model, x)
    optimizer.update(model, grads)

  with jax.set_mesh(mesh):
    step(model, optimizer, np.eye(16, 8, dtype="float32"))


def test_metrics_read_it_and_other_workers_continue_it():
  mesh, tx, model, optimizer = make_trainer(4)
  train_step(mesh, model, optimizer)
  saved = nnx.as_pure(optimizer.opt_state)
  assert jaxmotion.metrics(saved)["exchange/error_norm"] > 0
  params = nnx.as_pure(nnx.state(model, nnx.Param))
  layout = checkpoint.describe_state(tx, params, mesh)

  mesh, tx, model, optimizer = make_trainer(2)
  resized = checkpoint.resize(tx, saved, params, layout, mesh)
  jax.tree.map(
    lambda variable, leaf: variable.set_value(leaf),
    optimizer.opt_state,
    resized,
    is_leaf=lambda node: isinstance(node, nnx.Variable),
  )
  train_step(mesh, model, optimizer)
  found = nnx.as_pure(optimizer.opt_state)
  assert jaxmotion.metrics(found)["exchange/updates"] == 2
