"""Assignment of the examples of a batch to the microbatches of workers."""

from collections.abc import Sequence

import jax
import numpy as np

from jaxmotion import core
from jaxmotion.core import PyTree
from jaxmotion.hetero import _shares

_MOST = np.iinfo(np.int32).max


def assign_microbatches(
  batch: PyTree,
  counts: Sequence[int],
  *,
  microbatch: int,
  max_microbatches: int,
) -> tuple[PyTree, np.ndarray]:
  """Assigns the examples of a batch to workers, in whole microbatches.

  The order is kept: worker 0 gets the first counts[0] microbatches. Every
  worker's part has room for `max_microbatches`, so no shape depends on the
  counts. The result is a batch for `step(state, batch, counts=counts)` of
  `make_train_step(..., microbatches=max_microbatches)`.

  Args:
    batch: pytree of host arrays of shape (examples, ...).
    counts: int[workers], microbatches of each worker. They sum to the number
      of microbatches that the examples fill; the last one may be partly full.
    microbatch: number of examples in a microbatch.
    max_microbatches: largest count that any worker will ever have.

  Returns:
    The batch as (workers * max_microbatches * microbatch, ...), padded with
    zeros, and the mask of its examples, bool of the leading axis.

  Raises:
    TypeError, ValueError: counts that are no integers, exceed
      `max_microbatches`, or do not sum to the batch; leaves of different
      lengths.

  Example:
    >>> x, valid = assign_microbatches(
    ...   np.arange(5), (0, 2, 1), microbatch=2, max_microbatches=2
    ... )
    >>> x.reshape(3, 4).tolist()  # One row for each worker.
    [[0, 0, 0, 0], [0, 1, 2, 3], [4, 0, 0, 0]]
    >>> valid.reshape(3, 4).sum(axis=1).tolist()
    [0, 4, 1]
  """
  core.check_int("microbatch", microbatch, 1, _MOST)
  core.check_arrays("batch", batch)
  lengths = {np.shape(a)[:1] for a in jax.tree.leaves(batch)}
  if len(lengths) != 1 or () in lengths:
    raise ValueError(
      "`batch` must have leaves of one length along their leading axis, got"
      f" {sorted(lengths)}."
    )
  ((examples,),) = lengths
  core.check_int("max_microbatches", max_microbatches, 1, _MOST)
  count = _shares.as_numbers(counts, int)
  if count.ndim != 1 or (count < 0).any() or (count > max_microbatches).any():
    raise ValueError(
      f"`counts` must be integers in [0, {max_microbatches}], got {counts}."
    )
  needed = -(-examples // microbatch)
  if count.sum() != needed:
    raise ValueError(
      f"`counts` must sum to the {needed} microbatches of {examples} examples,"
      f" got {list(counts)}, which sum to {count.sum()}."
    )
  is_assigned = np.arange(max_microbatches) < count[:, None]

  def assign_leaf(a: np.ndarray) -> np.ndarray:
    a = np.asarray(a)
    padded = np.zeros((needed * microbatch, *a.shape[1:]), a.dtype)
    padded[:examples] = a
    shape = (len(count), max_microbatches, microbatch, *a.shape[1:])
    assigned = np.zeros(shape, a.dtype)
    assigned[is_assigned] = padded.reshape(needed, microbatch, *a.shape[1:])
    return assigned.reshape(-1, *a.shape[1:])

  return jax.tree.map(assign_leaf, batch), assign_leaf(np.ones(examples, bool))
