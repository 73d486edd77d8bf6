"""The preset computes what PyTorch's hook computes, and survives what kills it.

`power_sgd.npz` holds outputs of `powerSGD_hook` of PyTorch 2.13, rank 1, on
four workers: `mean` and each worker's `error` of six steps, of which two are at
full precision, and the first factors `q` that it drew. `power_sgd_in_turn.npz`
holds those of epfml/powersgd, rank 2, and both of its first factors.
"""

import jax
import numpy as np

import jaxmotion
from jaxmotion import codecs, core, presets
from jaxmotion.codecs._combinators._multi_round import Factors
from jaxmotion.codecs.extend import partition
from tests.paths import ROOT
from tests.presets.reference import (
  PARAMS,
  SHAPES,
  flatten,
  gradients,
  make_run,
)

GOLDEN = np.load(ROOT / "tests" / "presets" / "power_sgd.npz")
IN_TURN = np.load(ROOT / "tests" / "presets" / "power_sgd_in_turn.npz")


def test_means_and_memories_are_those_of_the_hook():
  tx = presets.power_sgd("data", rank=1, start=2, form="global")
  state, update = make_run(tx)
  factors = iter([GOLDEN["q0"], GOLDEN["q1"]])
  first = core.map_shared(
    lambda a: a,
    lambda part: core.Shared(next(factors)[None], part.axes),
    state.codec_state.value,
  )
  state = state._replace(codec_state=jaxmotion.PerWorker(first))
  for step in range(6):
    mean, state = update(gradients(step), state)
    np.testing.assert_allclose(flatten(mean), GOLDEN["mean"][step], atol=5e-6)
    for r in range(4):
      own = jax.tree.map(
        lambda a, r=r: a[r],
        [reduced.first.memory.value for reduced in state.codec_state.value],
      )
      error = GOLDEN[f"error{r}"][step]
      np.testing.assert_allclose(
        np.concatenate([np.asarray(a).reshape(-1) for a in own]),
        error,
        atol=5e-6,
      )
  assert int(state.count) == 6


def test_factors_in_turn_are_those_of_the_reference():
  tx = presets.power_sgd("data", rank=2, start=2, form="alternating")
  state, update = make_run(tx)
  ends = np.cumsum([0, 12 * 2, 16 * 2]), np.cumsum([0, 20 * 2, 8 * 2])
  firsts = iter(
    Factors(
      IN_TURN["p0"][a:b].reshape(1, -1, 2), IN_TURN["q0"][c:d].reshape(1, -1, 2)
    )
    for a, b, c, d in zip(
      ends[0][:2], ends[0][1:], ends[1][:2], ends[1][1:], strict=True
    )
  )
  first = core.map_shared(
    lambda a: a,
    lambda part: core.Shared(next(firsts), part.axes),
    state.codec_state.value,
  )
  state = state._replace(codec_state=jaxmotion.PerWorker(first))
  for step in range(6):
    mean, state = update(gradients(step), state)
    expected = IN_TURN["mean"][step]
    np.testing.assert_allclose(flatten(mean), expected, atol=5e-6)
    for r in range(4):
      errors = [part.first for part in state.codec_state.value]
      own = np.concatenate(
        [
          np.asarray(e.memory.value[r]).reshape(-1)
          if e
          else np.zeros(np.prod(shape), np.float32)
          for e, shape in zip(errors, SHAPES.values(), strict=True)
        ]
      )
      np.testing.assert_allclose(own, IN_TURN[f"error{r}"][step], atol=5e-6)


def test_bad_gradients_pass_and_later_ones_are_finite():
  state, update = make_run(
    presets.power_sgd("data", rank=2, start=1, nonfinite="skip")
  )
  good = gradients(0)
  of_rank_1 = {k: np.ones_like(a) for k, a in good.items()}
  bad = [
    good | {"a": good["a"] * 0},
    of_rank_1,
    good | {"c": np.where(good["c"] > 1, np.float32(np.nan), good["c"])},
    jax.tree.map(lambda a: a * np.float32(1e25), good),
  ]
  for grads in [good, *bad, good]:
    mean, state = update(grads, state)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(mean))
  assert int(state.skipped) == 1
  for part in core.shared_parts(state.codec_state.value):
    assert np.linalg.matrix_rank(part.value[0]) == 2


def test_only_leaves_that_factors_make_smaller_are_factored():
  codec = codecs.where_smaller(codecs.low_rank(rank=2))
  kinds = {
    path: type(group.codec).__name__
    for group in partition(codec, PARAMS).leaf_groups
    for path in [list(SHAPES)[group.leaves[0]]]
  }
  assert kinds == {
    "a": "low_rank",
    "b": "identity",
    "c": "low_rank",
    "d": "identity",
  }
  far = codecs.where_smaller(codecs.low_rank(rank=2), min_ratio=3)
  groups = partition(far, PARAMS).leaf_groups
  assert [type(g.codec).__name__ for g in groups][::2] == [
    "low_rank",
    "identity",
  ]
