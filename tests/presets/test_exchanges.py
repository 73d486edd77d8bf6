"""Presets of exchanges compute what their papers or references do.

`power_sgd.npz` holds outputs of `powerSGD_hook` of PyTorch 2.13, rank 1, on
four workers: `mean` and each worker's `error` of six steps, of which two are at
full precision, and the first factors `q` that it drew. `power_sgd_in_turn.npz`
holds those of epfml/powersgd, rank 2, and both of its first factors. `dgc.npz`
holds means of synxlin/deep-gradient-compression on four workers, of a matrix of
12 x 20, at a ratio of 0.05, sampled whole, and a momentum of 0.9.
"""

import jax
import numpy as np
import optax
import pytest

import jaxmotion
from jaxmotion import codecs, core, presets
from jaxmotion.codecs._combinators._multi_round import Factors
from jaxmotion.codecs.extend import partition
from tests.paths import ROOT
from tests.presets.reference import (
  PARAMS,
  SHAPES,
  THREE,
  flatten,
  gradients,
  make_run,
  normal_gradients,
  pick,
  run_on_three,
)

GOLDEN, IN_TURN, DGC = (
  np.load(ROOT / "tests" / "presets" / f"{name}.npz")
  for name in ("power_sgd", "power_sgd_in_turn", "dgc")
)


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


def orthogonalize(matrix):
  matrix = matrix.copy()
  for i in range(matrix.shape[1]):
    matrix[:, i] /= np.linalg.norm(matrix[:, i])
    rest = matrix[:, i + 1 :]
    rest -= np.outer(matrix[:, i], matrix[:, i] @ rest)
  return matrix


@pytest.mark.parametrize("view", ["first", "last"])
def test_power_sgd_of_rank_3_is_the_definition(view):
  shape = (5, 7, 13)
  a, b = (5, 91) if view == "first" else (35, 13)
  shapes = {"matrix": shape, "vector": (17,)}
  tx = presets.power_sgd("data", rank=3, start=0, form="global", view=view)
  state, update = run_on_three(tx, shapes)
  right = np.random.default_rng(9).normal(size=(b, 3))
  first = core.map_shared(
    lambda x: x,
    lambda part: core.Shared(right[None].astype(np.float32), part.axes),
    state.codec_state.value,
  )
  made = state._replace(codec_state=jaxmotion.PerWorker(first))
  # Placed as before, so that the second step is not traced again.
  state = jax.device_put(made, jax.tree.map(lambda a: a.sharding, state))
  error = np.zeros((THREE, a, b))
  for step in range(3):  # Every step makes what float32 rounds twice as large.
    grads = normal_gradients(step, shapes)
    means, state = update(grads, state)
    v = grads["matrix"].reshape(THREE, a, b) + error
    left = orthogonalize(v.sum(0) @ orthogonalize(right))
    right = v.mean(0).T @ left
    error = v - left @ right.T
    found = np.asarray(means["matrix"]).reshape(a, b)
    np.testing.assert_allclose(found, left @ right.T, atol=5e-6)
    np.testing.assert_allclose(
      means["vector"], grads["vector"].mean(0), atol=5e-6
    )


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
def test_dgc_means_are_those_of_the_reference(nesterov, masking):
  """Those of whole arrays, gathered, of which the preset's are a variant."""
  few = codecs.chain(
    codecs.tiles(chunk=2**31 - 1), codecs.topk_columns(density=0.05)
  )
  options = dict(decay=0.9, nesterov=nesterov)
  codec = codecs.where_smaller(
    codecs.momentum_correction(
      codecs.feedback(few), masking=masking, **options
    ),
    codecs.momentum_correction(codecs.identity(), masking=False, **options),
    min_dimensions=2,
    min_ratio=1e-9,
  )
  golden = DGC[f"mean_nesterov{nesterov:d}_masking{masking:d}"]
  params = pick(PARAMS)
  tx = jaxmotion.exchange("data", codec, method="gather")
  state, update = make_run(tx, params)
  trace = optax.trace(0.9, nesterov=False)
  dense = trace.init(params["b"])
  for step in range(6):
    grads = {k: gradients(step)[k] for k in "ab"}
    mean, state = update(grads, state)
    np.testing.assert_allclose(mean["a"], golden[step], atol=5e-6)
    if not nesterov:
      # A vector has the momentum of its mean.
      expected, dense = trace.update(grads["b"].mean(0), dense)
      np.testing.assert_allclose(mean["b"], expected, atol=5e-6)


def test_more_is_sent_at_first_and_gradients_are_clipped():
  tx = presets.dgc("data", density=0.01, warmup=8, min_size=0)
  state, update = make_run(tx)
  sent = []
  for step in range(6):
    mean, state = update(gradients(0), state)
    # A worker's gradient has at most norm 1 / sqrt(4), grown by momentum.
    assert np.linalg.norm(flatten(mean)) <= 0.501 * (step + 1)
    sent.append(np.count_nonzero(mean["a"]))
  assert sent[0] > 1.5 * sent[2] > 2 * sent[4]


def test_stages_of_the_warm_up_end_where_they_should():
  tx = presets.dgc("data", density=0.05, warmup=6, clip_norm=None, min_size=0)
  state, update = make_run(tx, pick(PARAMS))
  same = {k: np.stack([a[0]] * 4) for k, a in pick(gradients(0)).items()}
  for stage in (1, 2, 2, 3, 4, 4, 5, 5):
    mean, state = update(same, state)
    few = codecs.topk(density=0.05 ** (stage / 5))
    payload, _ = few.encode(same["a"][0])
    count = np.count_nonzero(few.decode(payload, same["a"][0]))
    assert np.count_nonzero(mean["a"]) == count


def test_what_is_not_sent_is_sent_later_with_its_momentum():
  """At momentum 0, all that comes in goes out."""
  tx = presets.dgc(
    "data",
    density=0.25,
    momentum=0.0,
    clip_norm=None,
    warmup=0,
    min_size=0,
  )
  state, update = make_run(tx)
  sent = jax.tree.map(np.zeros_like, {k: a[0] for k, a in gradients(0).items()})
  zeros = jax.tree.map(np.zeros_like, gradients(0))
  for step in range(12):
    mean, state = update(zeros if step else gradients(0), state)
    sent = jax.tree.map(np.add, sent, mean)
  exact = jax.tree.map(lambda a: a.mean(0), gradients(0))
  np.testing.assert_allclose(flatten(sent), flatten(exact), atol=1e-6)


def test_a_matrix_in_two_phases_has_its_momentum_once():
  """The workers that average rows encode means of momenta as they are."""
  codec = codecs.momentum_correction(
    codecs.feedback(codecs.topk(density=1.0)), masking=False
  )
  tx = jaxmotion.exchange("data", codec, method="two_phase")
  rng = np.random.default_rng(0)
  grads = {"w": rng.normal(size=(4, 32, 40)).astype(np.float32)}
  state, update = make_run(tx, {"w": grads["w"][0]})
  trace = optax.trace(0.9)
  plain = trace.init(grads["w"][0])
  for _ in range(3):
    mean, state = update(grads, state)
    expected, plain = trace.update(grads["w"].mean(0), plain)
    np.testing.assert_allclose(mean["w"], expected, atol=1e-5)


def ef21_means(name, momentum, count, steps, start):
  """Means of EF21-SGDM with so many of the greatest elements of an array."""
  average = own = np.zeros_like(gradients(0)[name]).reshape(4, -1)
  for step in range(steps):
    grad = gradients(step)[name].reshape(4, -1)
    keep = momentum if step else 0.0
    average = keep * average + (1 - keep) * grad
    change = average - own
    if step >= start:
      least = np.sort(np.abs(change), axis=1)[:, -count][:, None]
      change = np.where(np.abs(change) >= least, change, 0)
    own = own + change
    yield own.mean(0)


@pytest.mark.parametrize(("momentum", "start"), [(0.9, 1), (0.0, 0)])
def test_ef21_means_are_those_of_the_definition(momentum, start):
  tx = presets.ef21_sgdm(
    "data",
    codec=codecs.topk(density=0.1, block=240),
    momentum=momentum,
    start=start,
    min_size=0,
  )
  state, update = make_run(tx, pick(PARAMS))
  expected = {
    name: ef21_means(name, momentum, count, 6, start)
    for name, count in [("a", 24), ("b", 20)]  # A vector travels whole.
  }
  for step in range(6):
    mean, state = update(pick(gradients(step)), state)
    for name, means in expected.items():
      found = np.asarray(mean[name]).ravel()
      np.testing.assert_allclose(found, next(means), atol=5e-6)
