"""The preset computes what PyTorch's hook computes, and survives what kills it.

`power_sgd.npz` holds outputs of `powerSGD_hook` of PyTorch 2.13, rank 1, on
four workers: `mean` and each worker's `error` of six steps, of which two are at
full precision, and the first factors `q` that it drew.
"""

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

import jaxmotion
from jaxmotion import codecs, core, presets
from jaxmotion.codecs.extend import partition
from tests.paths import ROOT

GOLDEN = np.load(ROOT / "tests" / "presets" / "power_sgd.npz")
SHAPES = {"a": (12, 20), "b": (20,), "c": (16, 8), "d": (9,)}
PARAMS = {k: np.zeros(shape, np.float32) for k, shape in SHAPES.items()}
MESH = Mesh(np.array(jax.devices()[:4]), ("data",))


def gradients(step):
  """Gradients of all workers, as the hook got them."""
  rngs = [np.random.default_rng(1000 * step + r) for r in range(4)]
  each = [
    {k: g.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}
    for g in rngs
  ]
  return jax.tree.map(lambda *leaves: np.stack(leaves), *each)


def flatten(tree):
  return np.concatenate([np.asarray(tree[k]).reshape(-1) for k in SHAPES])


def make_run(tx):
  state = jaxmotion.bind_mesh(tx, MESH).init(PARAMS)
  specs = jaxmotion.state_specs(state, "data")
  update = jax.shard_map(
    lambda g, s: tx.update(jax.tree.map(lambda a: a[0], g), s),
    mesh=MESH,
    in_specs=(P("data"), specs),
    out_specs=(P(), specs),
  )
  return state, jax.jit(update)


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
