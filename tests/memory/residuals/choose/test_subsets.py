import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion.memory.residuals.choose._min_cut import values_read_by_backward
from jaxmotion.memory.residuals.choose._subsets import Candidate, find_subsets
from jaxmotion.memory.residuals.trace import trace_joint

OPS = (
  lambda a, b: jnp.sin(a),
  lambda a, b: jnp.exp(b),
  lambda a, b: a * b,
  lambda a, b: a @ b,
)


def random_program(rng, steps=9):
  """Traces a function of two arrays whose steps read random earlier values."""
  picks = [
    (OPS[rng.integers(len(OPS))], *rng.integers(0, i + 2, 2))
    for i in range(steps)
  ]

  def fn(x, y):
    values = [x, y]
    for op, a, b in picks:
      values.append(op(values[a], values[b]))
    return [values[-1] + values[-2]], ()

  like = jax.core.ShapedArray((4, 4), jnp.dtype("float32"))
  return trace_joint(fn, [like, like], [like])


def brute_force(joint, reads, live, candidates, seconds):
  """Bytes and seconds of the sets that none is better than."""
  found = []
  for flags in itertools.product((False, True), repeat=len(candidates)):
    pairs = zip(candidates, flags, strict=True)
    if any(not (flag or c.may_be_missing) for c, flag in pairs):
      continue
    saved = [c for c, flag in zip(candidates, flags, strict=True) if flag]
    known = {*live, *joint.program.constants, *(c.value for c in saved)}
    rerun = joint.order.leading_to(reads, known)
    needed = {*reads, *(v for step in rerun for v in step.reads)}
    if any(v in joint.inputs and v not in known for v in needed):
      continue
    cost = sum(c.seconds for c in saved) + sum(seconds[s] for s in rerun)
    found.append((sum(c.nbytes for c in saved), cost))
  best, front = math.inf, []
  for nbytes, cost in sorted(found):
    if cost < best:
      front.append((nbytes, cost))
      best = cost
  return front


@pytest.mark.parametrize("seed", range(20))
def test_front_of_random_programs_is_that_of_all_subsets(seed):
  rng = np.random.default_rng(seed)
  joint = random_program(rng)
  live = {joint.inputs[0]}
  reads = values_read_by_backward(joint, live)
  steps = joint.order.leading_to(reads, live)
  values = [joint.inputs[1], *(v for s in steps for v in s.outs)]
  some = [v for v in values if rng.random() < 0.7][:10]
  # Whole numbers: sums are exact in any order.
  candidates = [
    Candidate(
      v, int(rng.integers(1, 9)), float(rng.integers(4)), rng.random() < 0.9
    )
    for v in some
  ]
  seconds = {
    s: math.inf if rng.random() < 0.1 else float(rng.integers(1, 9))
    for s in steps
  }
  front = find_subsets(
    joint,
    reads,
    {*live, *joint.program.constants},
    candidates,
    seconds.__getitem__,
  )
  expected = brute_force(joint, reads, live, candidates, seconds)
  assert [(s.nbytes, s.seconds) for s in front] == expected
  for subset in front:
    chosen = [c for c in candidates if c.value in subset.saved]
    assert sum(c.nbytes for c in chosen) == subset.nbytes
