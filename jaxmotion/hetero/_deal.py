"""From one batch to every worker's microbatches."""

from collections.abc import Sequence

import jax
import numpy as np

from jaxmotion.core import PyTree, check_int


def assign_microbatches(
  batch: PyTree, counts: Sequence[int], *, microbatch: int, most: int
) -> tuple[PyTree, np.ndarray]:
  """Deals the examples of a batch to workers, each its count of microbatches.

  In order: worker 0 gets the first counts[0] microbatches. Its buffer has room
  for `most`, whatever it gets, so that no count changes a shape.

  Args:
    batch: pytree of arrays on the host, (examples, ...).
    counts: microbatches of each worker. They sum to as many as the examples
      fill, of which the last may be partly filled.
    microbatch: examples a microbatch.
    most: greatest count that any worker will ever have.

  Returns:
    The batch as (workers, most, microbatch, ...), zeros where there is nothing,
    and a bool[workers, most, microbatch] that says where there is something.

  Raises:
    TypeError, ValueError: counts that are none, exceed `most`, or do not sum
      to the batch; leaves of different lengths.

  Example:
    >>> x, valid = assign_microbatches(np.arange(5), (0, 2, 1), microbatch=2, most=2)
    >>> x.tolist()
    [[[0, 0], [0, 0]], [[0, 1], [2, 3]], [[4, 0], [0, 0]]]
    >>> valid.sum(axis=(1, 2)).tolist()
    [0, 4, 1]
  """
  check_int("microbatch", microbatch, 1)
  lengths = {np.shape(a)[:1] for a in jax.tree.leaves(batch)}
  if len(lengths) != 1 or () in lengths:
    raise ValueError(
      "`batch` must have leaves of one length along their leading axis, got"
      f" {sorted(lengths)}."
    )
  ((examples,),) = lengths
  count = check_counts(counts, most)
  needed = -(-examples // microbatch)
  if count.sum() != needed:
    raise ValueError(
      f"`counts` must sum to the {needed} microbatches of {examples} examples,"
      f" got {list(counts)}, which sum to {count.sum()}."
    )
  place = np.arange(most) < count[:, None]

  def spread(a: np.ndarray) -> np.ndarray:
    a = np.asarray(a)
    rows = np.zeros((needed * microbatch, *a.shape[1:]), a.dtype)
    rows[:examples] = a
    out = np.zeros((len(count), most, microbatch, *a.shape[1:]), a.dtype)
    out[place] = rows.reshape(needed, microbatch, *a.shape[1:])
    return out

  return jax.tree.map(spread, batch), spread(np.ones(examples, bool))


def check_counts(
  counts: Sequence[int], most: int, workers: int | None = None
) -> np.ndarray:
  """Returns counts as int32; raises unless they are some, of [0, most].

  Args:
    counts: microbatches of each worker, on the host.
    most: greatest count a buffer has room for.
    workers: how many counts there are, where that is known.
  """
  check_int("most", most, 1)
  count = np.asarray(counts)
  if (
    count.ndim != 1
    or workers not in (None, len(count))
    or not np.issubdtype(count.dtype, np.integer)
    or (count < 0).any()
    or (count > most).any()
  ):
    many = "" if workers is None else f"{workers} "
    raise ValueError(
      f"`counts` must be {many}integers in [0, {most}], got {counts}."
    )
  return count.astype(np.int32)
