"""Who is dealt which examples."""

from collections.abc import Sequence

import numpy as np

from experiments.data.images import batch_indices, load_digits
from experiments.train import tasks
from jaxmotion import hetero

Batch = tasks.Batch


class Dealer:
  """Deals the training images to workers, a pure function of seed and step.

  Args:
    how: "shuffled" deals every batch at random, each epoch a permutation.
      "by_class" sorts the images by label and gives each worker its own
      stretch, as long as its share of the work, to draw from: so every image
      is as likely as any other, but workers see different classes.
    microbatch: examples a microbatch.
    total: microbatches a step.
  """

  def __init__(self, how: str, *, microbatch: int, total: int):
    self._shuffled = how == "shuffled"
    self._microbatch, self._total = microbatch, total
    data = load_digits()
    count = len(data.train.labels)
    whole, _ = tasks.image_batches(data, count)
    batch = whole(0, 0)
    order = np.argsort(batch["labels"], kind="stable")
    self.images: Batch = {k: a[order] for k, a in batch.items()}

  def deal(
    self,
    counts: Sequence[int],
    slow: Sequence[int],
    seed: int,
    step: int,
    *,
    weighted: bool = True,
  ) -> Batch:
    """Returns a batch of (workers, total, ...) arrays for `uneven.step`.

    Args:
      counts: microbatches of each worker.
      slow: how often each worker does every microbatch.
      seed: of the run.
      step: of the run.
      weighted: whether examples weigh the same; else workers do.
    """
    index = self._indices(np.asarray(counts), seed, step)
    examples = {k: a[index] for k, a in self.images.items()}
    batch, valid = hetero.assign_microbatches(
      examples,
      counts,
      microbatch=self._microbatch,
      max_microbatches=self._total,
    )
    shape = valid.shape[:2]
    share = np.maximum(counts, 1)[:, None]
    weight = np.asarray(self._microbatch if weighted else 1 / share)
    repeats = np.asarray(slow)[:, None]
    return batch | {
      "weight": np.broadcast_to(weight.astype(np.float32), shape),
      "repeats": np.broadcast_to(repeats.astype(np.int32), shape),
    }

  def _indices(self, counts: np.ndarray, seed: int, step: int) -> np.ndarray:
    size, images = self._total * self._microbatch, len(self.images["labels"])
    if self._shuffled:
      return batch_indices(images, size, seed, step)
    ends = np.rint(np.cumsum(counts) / self._total * images).astype(int)
    random = np.random.default_rng([seed, step])
    drawn = [
      begin + random.choice(end - begin, n * self._microbatch, replace=False)
      for begin, end, n in zip([0, *ends], ends, counts, strict=False)
    ]
    return np.concatenate(drawn)
