"""Data, batches and optimizer that all runs of a job share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax
from ml_collections import ConfigDict

from experiments.data import images
from experiments.data.labels import ImageData
from experiments.models import staged
from experiments.train.optimizer import make_optimizer
from experiments.train.tasks import Batch, image_batches
from experiments.weights.model import Model, as_model


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
  data: ImageData
  batch: Callable[[int, int], Batch]
  test: Callable[[], Any]

  def make_model(
    self, seed: int, *, size: int | None = None, width: float | None = None
  ) -> Model:
    """Returns the network of the configuration.

    Args:
      seed: seed of the initial parameters.
      size: height and width of its images; None is that of the configuration.
      width: factor of its channels; None is that of the configuration.
    """
    stages = staged.build_stages(
      self.config.model,
      size=size or self.config.image_size,
      channels=self.data.train.pixels.shape[-1],
      classes=self.data.classes,
      width=width or self.config.width,
      seed=seed,
    )
    return as_model(stages)


def load_context(config: ConfigDict) -> RunContext:
  """Reads the data that a configuration names."""
  data = images.resize_images(images.load_images(config), config.image_size)
  batch, test = image_batches(data, config.batch_size)
  return RunContext(config, make_optimizer(config), data, batch, test)
