"""Data, batches and optimizer that all runs of a job share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax
from ml_collections import ConfigDict

from experiments.models import staged, training
from experiments.train import optimizer, tasks
from experiments.weights import model


class RunContext(NamedTuple):
  """Data, batches and optimizer that all runs of a job share."""

  config: ConfigDict  # Configuration of the job.
  tx: optax.GradientTransformation  # The optimizer.
  data: training.ImageData  # Images of the size that the network takes.
  # Returns the training batch of (seed, step).
  batch: Callable[[int, int], tasks.Batch]
  test: Callable[[], Any]  # Iterates over the test batches.

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
  data = training.load_sized_images(config, config.image_size)
  batch, test = tasks.image_batches(data, config.batch_size)
  return RunContext(config, optimizer.make_optimizer(config), data, batch, test)
