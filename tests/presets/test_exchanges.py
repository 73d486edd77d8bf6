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
from tests.meshes import mesh_of
from tests.paths import ROOT
from tests.presets.reference import (
  PARAMS,
  SHAPES,
  flatten,
  gradients,
  make_run,
  pick,
)

GOLDEN, IN_TURN, DGC = (
  np.load(ROOT / "tests" / "presets" / f"{name}.npz")
  for name in ("power_sgd", "power_sgd_in_turn", "dgc")
)


def with_factors(state, factors):
  """A state of PowerSGD that begins with other factors, placed as before."""
  left = iter(factors)
  first = core.map_shared(
    lambda part: core.Shared(next(left), part.axes),
    state.codec_state.value,
  )
  made = state._replace(codec_state=jaxmotion.PerWorker(first))
  return jax.device_put(made, jax.tree.map(lambda a: a.sharding, state))


def cut_factors(flat, lengths):
  """Factors of rank 2, which a file holds one after the other."""
  ends = np.cumsum(lengths)[:-1] * 2
  return [a.reshape(1, -1, 2) for a in np.split(flat, ends)]


@pytest.mark.parametrize("form", ["global", "alternating"])
def test_means_and_memories_are_those_of_the_references(form):
  """Those of the hook, and of the reference that sends factors in turn."""
  is_hook = form == "global"
  golden, rank = (GOLDEN, 1) if is_hook else (IN_TURN, 2)
  tx = presets.power_sgd("data", rank=rank, start=2, form=form)
  state, update = make_run(tx)
  if is_hook:
    factors = [golden["q0"][None], golden["q1"][None]]
  else:
    left, right = (12, 16), (20, 8)
    pairs = cut_factors(golden["p0"], left), cut_factors(golden["q0"], right)
    factors = map(Factors, *pairs)
  state = with_factors(state, factors)
  for step in range(6):
    mean, state = update(gradients(step), state)
    np.testing.assert_allclose(flatten(mean), golden["mean"][step], atol=5e-6)
    # Leaves that travel whole have a memory in the hook alone.
    memories = [
      np.asarray(part.first.memory.value).reshape(4, -1)
      if part.first
      else np.zeros((4, np.prod(shape)), np.float32)
      for part, shape in zip(
        state.codec_state.value, SHAPES.values(), strict=True
      )
    ]
    for r, error in enumerate(np.concatenate(memories, 1)):
      np.testing.assert_allclose(error, golden[f"error{r}"][step], atol=5e-6)
  assert int(state.count) == 6


def test_what_power_sgd_sends_and_remembers_adds_up():
  """In the local form, after an update at full precision."""
  tx = presets.power_sgd("data", rank=1, start=1)
  state, update = make_run(tx, {"a": PARAMS["a"]})
  sent, exact = np.zeros((2, 12, 20))
  for step in range(4):
    grads = gradients(step)["a"]
    mean, state = update({"a": grads}, state)
    sent, exact = sent + mean["a"], exact + grads.mean(0)
  (part,) = state.codec_state.value
  remembered = codecs.feedback(codecs.low_rank(rank=1)).error
  error = jax.vmap(remembered)(part.first._replace(inner=())).mean(0)
  np.testing.assert_allclose(sent + error.reshape(12, 20), exact, atol=1e-5)
  assert np.abs(error).max() > 0.1  # Something is still to be sent.


@pytest.mark.parametrize(("view", "columns"), [("first", 91), ("last", 13)])
def test_power_sgd_has_factors_of_its_rank_and_view(view, columns):
  tx = presets.power_sgd("data", rank=3, view=view)
  state, _ = make_run(tx, {"matrix": np.zeros((5, 7, 13), np.float32)})
  (right,) = core.shared_parts(state.codec_state.value)
  assert right.value.shape == (1, columns, 3)


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


def test_each_worker_clips_its_gradient_by_the_norm_of_all():
  tx = presets.dgc(
    "data", density=1.0, momentum=0.0, clip_norm=8.0, warmup=0, min_size=0
  )
  state, update = make_run(tx, pick(PARAMS))
  grads = pick(gradients(0))
  grads["b"][0], grads["a"][0] = 0.0, 1e-3  # Too small to be clipped.
  flat = np.concatenate([a.reshape(4, -1) for a in grads.values()], axis=1)
  norms = np.linalg.norm(flat, axis=1)
  scales = np.minimum(1, 8.0 / np.sqrt(4) / norms)
  assert list(scales < 1) == [False, True, True, True]
  mean, _ = update(grads, state)
  for name, a in grads.items():
    expected = np.tensordot(scales, a, 1) / 4
    np.testing.assert_allclose(mean[name], expected, rtol=1e-5, atol=1e-7)


def test_a_warm_up_sends_more_in_stages_and_all_at_last():
  tx = presets.dgc(
    "data", density=0.05, momentum=0.0, warmup=6, clip_norm=None, min_size=0
  )
  same = {"a": np.stack([gradients(0)["a"][0]] * 2)}
  # Two workers send in one phase, in which five levels compile faster.
  mesh = mesh_of(2)
  state, update = make_run(tx, {"a": PARAMS["a"]}, mesh)
  sent = np.zeros_like(PARAMS["a"])

  @jax.jit
  def count_sent(x):
    """Counts the elements of each stage."""
    few = [codecs.topk(density=0.05 ** (stage / 5)) for stage in range(1, 6)]
    decoded = [codec.decode(codec.encode(x)[0], x) for codec in few]
    return [(y != 0).sum() for y in decoded]

  counts = count_sent(same["a"][0])
  for stage in (1, 2, 2, 3, 4, 4, 5, 5):
    mean, state = update(same, state)
    assert np.count_nonzero(mean["a"]) == counts[stage - 1]
    sent += mean["a"]
  assert np.abs(sent - 8 * same["a"][0]).max() > 1
  for _ in range(24):  # More steps than a block has elements.
    mean, state = update({"a": 0 * same["a"]}, state)
    sent += mean["a"]
  np.testing.assert_allclose(sent, 8 * same["a"][0], atol=1e-5)


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
