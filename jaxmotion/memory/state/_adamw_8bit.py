"""`adamw_8bit`: AdamW with 8-bit moments under the usual name."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from jaxmotion import codecs, core
from jaxmotion.core import PyTree
from jaxmotion.memory.state import _compress_state


def adamw_8bit(
  learning_rate: optax.ScalarOrSchedule = 1e-3,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: float = 1e-2,
  *,
  mask: PyTree | Callable[[optax.Params], Any] | None = None,
  min_leaf_size: int = 4096,
  block: int = 256,
  rules: Sequence[tuple[str, codecs.Codec | None]] = (),
  memory_kind: str | None = None,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Makes AdamW whose moments take 8 bits between updates.

  It is `compress_state(optax.adamw(...))` with the arguments and defaults of
  `AdamW8bit` of bitsandbytes: blocks of 256 elements, leaves of fewer than 4096
  in float32. Ours differs thus. First moments are on evenly spaced levels and
  second moments are floats of three bits of mantissa, both rounded
  stochastically. Theirs are on the levels of a dynamic tree, rounded to
  nearest. Embeddings are encoded unless a rule leaves them as they are. There
  is no clipping by percentiles and no `amsgrad`.

  Args:
    learning_rate: a number, or a schedule.
    b1: decay of first moments, in [0, 1).
    b2: decay of second moments, in [0, 1).
    eps: number that is added to the root of second moments.
    weight_decay: share of each parameter that an update subtracts, times the
      learning rate.
    mask: tree of bools, or function of parameters that returns one: which
      parameters decay.
    min_leaf_size: number of elements. Leaves of fewer stay as they are
      (`min_8bit_size` there).
    block: number of elements under one scale.
    rules: as of `compress_state`.
    memory_kind: None or "pinned_host", as of `compress_state`; the latter
      stands for a paged optimizer.
    seed: seed of stochastic rounding, in [0, 2**32).

  Returns:
    A transformation whose state is a `CompressedState`.

  Raises:
    TypeError, ValueError: as `compress_state`; a number is out of its range.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> tx = adamw_8bit(1e-3, rules=[("embedding", None)])
    >>> params = {"embedding": jnp.ones((64, 64)), "w": jnp.ones((64, 64))}
    >>> state = jax.eval_shape(tx.init, params)
    >>> type(state.inner[0].mu["w"]).__name__
    'EncodedLeaf'
    >>> state.inner[0].mu["embedding"].dtype
    dtype('float32')

  References:
    Dettmers et al., *8-bit Optimizers via Block-wise Quantization*, 2022. Code:
    bitsandbytes 0.45, optim/adamw.py.
  """
  core.check_number("b1", b1, 0, 1, open_high=True)
  core.check_number("b2", b2, 0, 1, open_high=True)
  core.check_number("eps", eps, 0)
  core.check_number("weight_decay", weight_decay, 0)
  if mask is not None and not callable(mask):
    for leaf in jax.tree.leaves(mask):
      core.check_bool("mask", leaf)
  if not callable(learning_rate):
    core.check_number("learning_rate", learning_rate, 0)
  return _compress_state.compress_state(
    optax.adamw(
      learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=mask
    ),
    first=codecs.uniform(bits=8, block=block, rounding="stochastic"),
    second=codecs.nonnegative(block=block, rounding="stochastic"),
    rules=rules,
    min_leaf_size=min_leaf_size,
    memory_kind=memory_kind,
    seed=seed,
  )
