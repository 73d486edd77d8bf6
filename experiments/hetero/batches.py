"""Batches that deal the training images to workers."""

from collections.abc import Sequence

import numpy as np

from experiments.data.images import batch_indices, load_digits
from experiments.train import tasks
from jaxmotion import hetero

Batch = tasks.Batch


class Dealer:
  """Deals the training images to workers, as a function of seed and step.

  Args:
    deal: "shuffled" deals every batch at random, each epoch a permutation.
      "by_class" sorts the images by label. Each worker draws from its own
      range, as long as its share of the work: all images are equally likely,
      but workers see different classes.
    microbatch: number of examples in a microbatch.
    total: number of microbatches in a step.
  """

  def __init__(self, deal: str, *, microbatch: int, total: int):
    self._is_shuffled = deal == "shuffled"
    self._microbatch, self._total = microbatch, total
    data = load_digits()
    count = len(data.train.labels)
    whole, _ = tasks.image_batches(data, count)
    batch = whole(0, 0)
    order = np.argsort(batch["labels"], kind="stable")
    self.images: Batch = {k: a[order] for k, a in batch.items()}

  def deal_batch(
    self,
    counts: Sequence[int],
    slow: Sequence[int],
    seed: int,
    step: int,
    *,
    weighted: bool = True,
  ) -> Batch:
    """Returns a batch for a step whose workers have room for `total`
    microbatches."""
    index = self._choose_images(np.asarray(counts), seed, step)
    examples = {k: a[index] for k, a in self.images.items()}
    batch, valid = hetero.assign_microbatches(
      examples,
      counts,
      microbatch=self._microbatch,
      max_microbatches=self._total,
    )
    own = len(valid) // len(counts)
    share = np.maximum(counts, 1)
    weight = np.full(len(counts), self._microbatch) if weighted else 1 / share
    return batch | {
      "weight": np.repeat(weight.astype(np.float32), own),
      "repeats": np.repeat(np.asarray(slow, np.int32), own),
    }

  def _choose_images(
    self, counts: np.ndarray, seed: int, step: int
  ) -> np.ndarray:
    size, images = self._total * self._microbatch, len(self.images["labels"])
    if self._is_shuffled:
      return batch_indices(images, size, seed, step)
    ends = np.rint(np.cumsum(counts) / self._total * images).astype(int)
    random = np.random.default_rng([seed, step])
    drawn = [
      begin + random.choice(end - begin, n * self._microbatch, replace=False)
      for begin, end, n in zip([0, *ends], ends, counts, strict=False)
    ]
    return np.concatenate(drawn)
