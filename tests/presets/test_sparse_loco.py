"""The preset computes what the reference of SparseLoCo does, or better.

`sparse_loco.npz` holds outputs of tplr-ai/CCLoco on four workers: parameters,
which begin at one, and each worker's `error`, with 3 elements of each row and
of each chunk of 4 of a vector, at a learning rate of 0.5 and a decay of 0.95.
"""

import jax
import numpy as np
import optax

from jaxmotion import codecs, presets
from jaxmotion.codecs.extend import partition
from tests.paths import ROOT
from tests.presets.reference import (
  PARAMS,
  flatten,
  gradients,
  make_run,
  own_errors,
  pick,
)

GOLDEN = np.load(ROOT / "tests" / "presets" / "sparse_loco.npz")


def codec_of(chunk, count, bits):
  selected = codecs.topk_columns(count=count)
  if bits:
    selected = codecs.chain(selected, codecs.codebook(bits=bits))
  head = codecs.tiles(chunk=chunk, fit="divide", shape="row")
  return codecs.feedback(
    codecs.chain(head, codecs.contributors(selected)), decay=0.95
  )


def test_parameters_and_memories_are_those_of_the_reference():
  tx = presets.sparse_loco(
    "data", 0.5, decay=0.95, count=3, chunk=4, bits=None, as_coded=True
  )
  state, update = make_run(tx)
  codec = codec_of(4, 3, None)
  groups = partition(codec, PARAMS).leaf_groups
  params = jax.tree.map(np.ones_like, PARAMS)

  @jax.jit
  def errors(states):
    return [g.codec.error(s) for g, s in zip(groups, states, strict=True)]

  for step in range(6):
    updates, state = update(gradients(step), state)
    params = optax.apply_updates(params, updates)
    expected = GOLDEN["params"][step]
    np.testing.assert_allclose(flatten(params), expected, atol=5e-6)
    for r in range(4):
      own = errors(own_errors(state, r))
      own = np.concatenate([np.asarray(a).reshape(-1) for a in own])
      np.testing.assert_allclose(own, GOLDEN[f"error{r}"][step], atol=5e-6)


def test_with_all_elements_it_is_plain_sgd():
  tx = presets.sparse_loco("data", 0.5, count=64 * 64, bits=None)
  state, update = make_run(tx, pick(PARAMS))
  for step in range(2):
    updates, state = update(pick(gradients(step)), state)
    mean = {k: -0.5 * a.mean(0) for k, a in gradients(step).items()}
    for k, found in updates.items():
      np.testing.assert_allclose(found, mean[k], atol=5e-6)
