"""Classifiers of `experiments.models` as tasks, such as ResNets."""

from experiments.models import catalog
from experiments.models.losses import task


def make_classifier_task(
  wrap: task.Wrap = task.run_plain,
  *,
  network: str,
  batch: int = 32,
  **options: int,
) -> task.Task:
  """Returns the loss of a network of `make_network`."""
  net = catalog.make_network(network, **options)
  return task.Task(
    lambda params, batch: net.loss(params, batch, lambda b, _: wrap(b)),
    net.params,
    net.batch(batch),
  )
