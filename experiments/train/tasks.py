"""Tasks to train on: data, model, loss and score."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

from experiments.common.console import JobError
from experiments.data import text as data_text
from experiments.data.images import batch_indices, load_images
from experiments.data.labels import ImageData, Images
from experiments.models import small

Batch = dict[str, np.ndarray]

_TEST_BATCH = 256


@dataclasses.dataclass(frozen=True)
class Task:
  """A model to train and a way to score it."""

  metric: str  # Name of the score in the rows.
  unit: str  # Unit of the score.
  build: Callable[[int], nnx.Module]  # Function from a seed to the model.
  # Differentiable function (model, batch) -> mean loss.
  loss: Callable[[Any, Batch], jax.Array]
  # Pure function (seed, step) -> training batch.
  batch: Callable[[int, int], Batch]
  # Function (model, test batch) -> sum of the examples' scores; examples with
  # weight 0 do not count.
  score_sum: Callable[[Any, Batch], jax.Array]
  score_divisor: float  # Number that divides the sum over all test batches.
  # Function that iterates over the test batches, all of one shape.
  test: Callable[[], Iterator[Batch]]
  # Further `(metric, value, unit)` about the data.
  facts: tuple[tuple[str, float | str, str], ...] = ()


def load_task(config: ConfigDict) -> Task:
  """Reads the data and builds the model that a configuration names."""
  match config.model:
    case "cnn":
      return _image_task(config)
    case "transformer":
      return _text_task(config)
  raise JobError(
    f"`config.model` must be cnn or transformer, got {config.model!r}."
  )


def image_batches(
  data: ImageData, size: int
) -> tuple[Callable[[int, int], Batch], Callable[[], Iterator[Batch]]]:
  """Returns the functions `batch` and `test` of a task about images."""
  train = data.train

  def batch(seed: int, step: int) -> Batch:
    index = batch_indices(len(train.labels), size, seed, step)
    return _image_batch(train, index)

  def test() -> Iterator[Batch]:
    return _pad_batches(_image_batch(data.test, slice(None)))

  return batch, test


def _image_task(config: ConfigDict) -> Task:
  data = load_images(config)
  shape = data.train.pixels.shape[1:]
  batch, test = image_batches(data, config.batch_size)
  return Task(
    metric="test_accuracy",
    unit="%",
    build=lambda seed: small.build_cnn(config, shape, data.classes, seed),
    loss=_image_loss,
    batch=batch,
    score_sum=_count_correct,
    score_divisor=len(data.test.labels) / 100,  # The score is in per cent.
    test=test,
  )


def _image_batch(images: Images, index: Any) -> Batch:
  pixels = images.pixels[index].astype(np.float32) / np.float32(127.5) - 1
  return {"pixels": pixels, "labels": images.labels[index]}


def _image_loss(model: Any, batch: Batch) -> jax.Array:
  logits = model(batch["pixels"])
  losses = optax.softmax_cross_entropy_with_integer_labels(
    logits, batch["labels"]
  )
  return losses.mean()


def _count_correct(model: Any, batch: Batch) -> jax.Array:
  is_right = jnp.argmax(model(batch["pixels"]), axis=-1) == batch["labels"]
  return jnp.sum(jnp.where(is_right, batch["weight"], 0.0))


def _text_task(config: ConfigDict) -> Task:
  data = data_text.load_text(config)
  held_out = data_text.cut_windows(data.test, config.context)

  def batch(seed: int, step: int) -> Batch:
    text = data_text.draw_windows(
      data.train, config.context, config.batch_size, seed, step
    )
    return {"text": text}

  return Task(
    metric="bits_per_byte",
    unit="bits/byte",
    build=lambda seed: small.build_transformer(config, seed),
    loss=lambda model, batch: _text_losses(model, batch).mean(),
    batch=batch,
    score_sum=_sum_bits,
    score_divisor=held_out[:, 1:].size,
    test=lambda: _pad_batches({"text": held_out}),
    facts=(
      ("corpus_sha256", data_text.corpus_sha256(data), "hex"),
      (
        "zlib9_bits_per_byte",
        data_text.zlib_bits_per_byte(data.test),
        "bits/byte",
      ),
    ),
  )


def _text_losses(model: Any, batch: Batch) -> jax.Array:
  text = batch["text"]
  return optax.softmax_cross_entropy_with_integer_labels(
    model(text[:, :-1]), text[:, 1:]
  )


def _sum_bits(model: Any, batch: Batch) -> jax.Array:
  bits = _text_losses(model, batch) / math.log(2)
  return jnp.sum(bits * batch["weight"][:, None])


def _pad_batches(examples: Batch) -> Iterator[Batch]:
  """Yields batches of one shape, padded with examples of weight 0."""
  # One shape makes scoring compile once.
  count = len(next(iter(examples.values())))
  for start in range(0, count, _TEST_BATCH):
    index = np.arange(start, start + _TEST_BATCH)
    batch = {k: v[np.minimum(index, count - 1)] for k, v in examples.items()}
    yield batch | {"weight": (index < count).astype(np.float32)}
