"""Classifiers of `experiments.models` as tasks, such as ResNets."""

from experiments.models.catalog import make_network
from experiments.models.losses.task import Task, Wrap, run_plain


def make_classifier_task(
  wrap: Wrap = run_plain, *, network: str, batch: int = 32, **options: int
) -> Task:
  """Returns the loss of a network of `make_network`.

  Args:
    wrap: what runs in place of a block, as a function of the block.
    network: name of the network.
    batch: number of images.
    **options: options of the network.
  """
  net = make_network(network, **options)
  return Task(
    lambda params, batch: net.loss(params, batch, lambda b, _: wrap(b)),
    net.params,
    net.batch(batch),
  )
