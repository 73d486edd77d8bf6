"""Training of a network with snapshots of its activations on the way."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import models
from experiments.common import loop
from experiments.data import labels
from experiments.models import training
from jaxmotion.core import Array, PyTree

_SCORED = 1024  # Held-out images that are scored, at most.
_SAMPLED = 32  # Images of a snapshot, at most.


class Snapshot(NamedTuple):
  """Activations and accuracy of a network after some steps.

  Attributes:
    step: number of training steps done.
    loss: mean loss of the held-out images of the snapshot, in nats.
    accuracy: share of up to 1024 held-out images, in per cent.
    calibration: activations of a batch of training images, by name.
    held_out: activations of as many held-out images, by name.
  """

  step: int
  loss: float
  accuracy: float
  calibration: dict[str, np.ndarray]
  held_out: dict[str, np.ndarray]


def train_network(
  net: models.Network,
  images: labels.ImageData,
  *,
  steps: Sequence[int],
  batch: int,
  seed: int,
  on_snapshot: Callable[[Snapshot], None],
  on_step: loop.OnStep,
) -> float:
  """Trains a network with Adam and takes snapshots at some steps."""
  # Returns the mean time of a step, milliseconds.
  last = steps[-1]
  optimizer = training.make_optimizer(last)
  params = jax.jit(net.init)(jax.random.key(seed))

  @jax.jit
  def update(
    params: PyTree, opt_state: PyTree, batch: tuple[Array, Array]
  ) -> tuple[PyTree, PyTree, Array]:
    loss, grads = jax.value_and_grad(net.loss)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  def step(
    state: tuple[PyTree, PyTree], batch: tuple[Array, Array]
  ) -> tuple[tuple[PyTree, PyTree], float]:
    *state, loss = update(*state, batch)
    return tuple(state), float(loss)

  sampler = _Sampler(net, images, min(batch, _SAMPLED))

  def take_snapshot(done: int, state: tuple[PyTree, PyTree]) -> None:
    if done in steps:
      on_snapshot(sampler.sample(done, state[0]))

  state = params, jax.jit(optimizer.init)(params)
  take_snapshot(0, state)
  _, log = loop.run_steps(
    state,
    step,
    training.make_batches(images.train, batch, seed),
    steps=last,
    checkpoint_every=max(1, last),
    evaluate=take_snapshot,
    on_step=on_step,
  )
  return sum(log.step_ms) / max(1, last)


class _Sampler:
  """Takes snapshots of always the same images."""

  def __init__(self, net: models.Network, images: labels.ImageData, batch: int):
    self._images = images
    self._batch = batch

    # One program, because its three results share most of the forward pass.
    @jax.jit
    def run(params: PyTree, batch: tuple[Array, Array]) -> tuple:
      logits = net.apply(params, batch[0])
      hits = jnp.sum(logits.argmax(-1) == batch[1])
      return net.loss(params, batch), hits, net.activations(params, batch[0])

    self._run = run

  def sample(self, step: int, params: PyTree) -> Snapshot:
    """Takes a snapshot after a number of steps."""
    _, _, calibration = self._run_batch(self._images.train, 0, params)
    loss, _, held_out = self._run_batch(self._images.test, 0, params)
    count = min(_SCORED, len(self._images.test.labels)) // self._batch
    hits = sum(
      int(self._run_batch(self._images.test, i, params)[1])
      for i in range(count)
    )
    accuracy = 100 * hits / (count * self._batch)
    sampled = (
      {name: np.asarray(y) for name, y in part.items()}
      for part in (calibration, held_out)
    )
    return Snapshot(step, float(loss), accuracy, *sampled)

  def _run_batch(self, images: labels.Images, i: int, params: PyTree) -> tuple:
    """Returns loss, hits and activations of the i-th batch."""
    chosen = np.arange(i * self._batch, (i + 1) * self._batch)
    return self._run(params, training.select_batch(images, chosen))
