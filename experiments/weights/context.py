"""Data, batches and optimizer that all runs of a job share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax
from ml_collections import ConfigDict

from experiments.data import images, labels
from experiments.models import staged
from experiments.train import optimizer, tasks
from experiments.weights import model


class RunContext(NamedTuple):
  """Data, batches and optimizer that all runs of a job share.

  Attributes:
    config: configuration of the job.
    tx: the optimizer.
    data: images of the size that the network takes.
    batch: returns the training batch of (seed, step).
    test: iterates over the test batches.
  """

  config: ConfigDict
  tx: optax.GradientTransformation
  data: labels.ImageData
  batch: Callable[[int, int], tasks.Batch]
  test: Callable[[], Any]

  def make_model(
    self, seed: int, *, size: int | None = None, width: float | None = None
  ) -> model.Model:
    """Returns the network of the configuration."""
    stages = staged.build_stages(
      self.config.model,
      size=size or self.config.image_size,
      channels=self.data.train.pixels.shape[-1],
      classes=self.data.classes,
      width=width or self.config.width,
      seed=seed,
    )
    return model.as_model(stages)


def load_context(config: ConfigDict) -> RunContext:
  """Reads the data that a configuration names."""
  data = images.resize_images(images.load_images(config), config.image_size)
  batch, test = tasks.image_batches(data, config.batch_size)
  return RunContext(config, optimizer.make_optimizer(config), data, batch, test)
