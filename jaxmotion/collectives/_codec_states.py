"""States of one codec on all workers, from the parts of its memory."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from jaxmotion import codecs, core
from jaxmotion.core import Array, PyTree, ShapedLike


def read_states(
  codec: codecs.Codec, states: PyTree, like: ShapedLike, axes: int = 1
) -> dict[str, Array]:
  """Returns what a codec remembers in states that have leading axes."""
  # axes: number of leading axes of the states, such as one of workers.
  read: Callable[[PyTree], dict[str, Array]]
  read = lambda state: codec.read_memory(state, like)
  if not codec.memory_parts:
    return read(states)
  for _ in range(axes):
    read = jax.vmap(read)
  # `Shared` parts have no axis of workers.
  return read(core.drop_shared(states))


def write_states(
  codec: codecs.Codec,
  parts: Mapping[str, Array],
  like: ShapedLike,
  lead: tuple[int, ...],
  *,
  canonical: bool = False,
) -> PyTree:
  """Returns states with leading axes that remember these parts."""
  # parts: float32[*lead, ...] by name. lead: number of workers, and of rows
  # that each encodes if there are any.
  # canonical: whether codecs of several levels share the state.

  def write(parts: PyTree, means: PyTree) -> PyTree:
    state = codec.write_memory(parts, means, like, lead[0])
    return codec.canonical_state(state) if canonical else state

  for rows in lead[:0:-1]:
    write = jax.vmap(write, axis_size=rows)
  means = {name: rows.mean(0) for name, rows in parts.items()}
  write = jax.vmap(write, (0, None), axis_size=lead[0])
  return core.map_shared(
    lambda a: a,
    lambda node: core.Shared(jax.tree.map(lambda a: a[:1], node.value)),
    write(dict(parts), means),
  )


def resize_parts(
  codec: codecs.Codec,
  parts: Mapping[str, Array],
  shape: tuple[int, ...],
  workers: int,
  *,
  op: str = "mean",
  reset_memory: bool = False,
) -> dict[str, Array]:
  """Returns the parts of a codec's memory of one array, on other workers."""
  # parts: float32[old workers, *shape] by name; others are zeros.
  found = {}
  for part in codec.memory_parts:
    if part.row_of is not None:
      continue
    rows = parts.get(part.name)
    # `reset_memory` forgets what is still to be sent.
    if rows is None or (reset_memory and part.is_pending):
      found[part.name] = jnp.zeros((workers, *shape), jnp.float32)
      continue
    is_summed = op == "sum" and not part.keeps_mean
    scale = len(rows) / workers if is_summed else 1.0
    found[part.name] = mix_rows(rows, workers) * scale
  return found


def mix_rows(rows: Array, count: int) -> Array:
  """Returns rows of new workers, averages of the old rows they take over."""
  # rows: floating-point [old workers, ...].
  core.check_float("rows", rows)
  if not jnp.ndim(rows):
    raise ValueError(f"`rows` must have an axis of workers, got {rows!r}.")
  core.check_int("count", count, 1, 2**31 - 1)
  if rows.shape[0] == count:
    return rows
  return jnp.stack([_mix_row(rows, new, count) for new in range(count)])


def _mix_row(rows: Array, new: int, count: int) -> Array:
  """Returns the average of old rows that one of the new workers takes over."""
  old = rows.shape[0]
  terms = []
  for r in range(old):
    # In units of 1 / (old * count), so that shares are exact.
    share = min((new + 1) * old, (r + 1) * count) - max(new * old, r * count)
    if share > 0:
      terms.append(rows[r] * (share / old))
  while len(terms) > 1:  # In pairs: a mean of 2^n copies has no rounding.
    pairs = [a + b for a, b in zip(terms[::2], terms[1::2], strict=False)]
    terms = pairs + terms[2 * len(pairs) :]
  return terms[0]
