"""Which optimizers may update parts of the parameters one after another."""

import jax.numpy as jnp
import optax
import pytest

from jaxmotion import memory
from jaxmotion.memory._check_separate import check_separate

PARAMS = {"a": jnp.ones((4, 2)), "b": jnp.ones(3), "c": jnp.ones((2, 2))}
LABELS = {"a": "clipped", "b": "plain", "c": "clipped"}
CLIP = optax.clip_by_global_norm(1.0)
PARTS = {"clipped": CLIP, "plain": optax.adam(0.1)}
CLIP_SOME = optax.multi_transform(PARTS, LABELS)
REFUSED = {
  "clip": (optax.chain(CLIP, optax.adam(0.1)), "b"),
  "clip_some": (CLIP_SOME, "c"),
  "finite": (optax.apply_if_finite(optax.sgd(0.1), 3), "b"),
  "every_two": (optax.MultiSteps(CLIP, 2).gradient_transformation(), "b"),
}
TAKEN = {
  "adamw": optax.adamw(0.1),
  "adafactor": optax.adafactor(0.1),
  "muon": optax.contrib.muon(0.1),
  "by_array": optax.chain(optax.clip_by_block_rms(1.0), optax.lion(0.1)),
  "every_two": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
  "scheduled": optax.inject_hyperparams(optax.adam)(
    optax.cosine_decay_schedule(0.1, 10)
  ),
  "frozen": optax.multi_transform(
    {"clipped": optax.set_to_zero(), "plain": optax.sgd(0.1)}, LABELS
  ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_updates_that_read_gradients_of_other_arrays_are_refused(case):
  tx, other = REFUSED[case]
  match = f"`tx` must update .*the update of `a` reads .* `{other}`"
  with pytest.raises(ValueError, match=match):
    check_separate(tx, PARAMS, "block")


@pytest.mark.parametrize("case", TAKEN)
def test_updates_of_each_array_by_itself_are_taken(case):
  check_separate(TAKEN[case], PARAMS, "block")
  # One array, or none, reads no other.
  for params in ((), {"a": jnp.ones(3)}):
    check_separate(CLIP, params, "block")


def run_block(params, x):
  return jnp.tanh(x @ params["a"] + params["b"])


def mean_square(x):
  return jnp.mean(x**2)


def test_blocks_and_stages_that_are_updated_one_after_another_refuse_them():
  row, tx = {"a": jnp.eye(3), "b": jnp.ones(3)}, REFUSED["clip"][0]
  for repeats in (1, 2):
    params = {name: jnp.stack([x] * repeats) for name, x in row.items()}
    blocks = [(run_block, repeats)]
    model = memory.OptimizerInBackward(blocks, mean_square, tx)
    with pytest.raises(ValueError, match="gradients of one block are gone"):
      model.init([row if repeats == 1 else params])
  stages = [
    ("first", lambda params, x, batch: run_block(params, batch)),
    ("last", lambda params, x, batch: mean_square(run_block(params, x))),
  ]
  params = {"first": row, "last": row}
  model = memory.HostResident(stages, tx, update="per_stage", min_leaf_size=0)
  with pytest.raises(ValueError, match="gradients of one stage are gone"):
    model.init(params)
  memory.HostResident(stages, tx, min_leaf_size=0).init(params)
