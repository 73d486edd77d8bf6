"""Trainers in other people's styles keep `jit`, and change three lines."""

import importlib
import inspect

import jax
import numpy as np
import pytest

import jaxmotion
import jaxmotion.nnx
from jaxmotion import codecs

STEPS = 20
INT8 = codecs.feedback(codecs.uniform(bits=8))
# Trainer -> axis of the workers, and lines that change besides the optimizer.
TRAINERS = {
  "padded_text": ("data", {"jax.value_and_grad(": "jaxmotion.value_and_grad("}),
  "image_net": ("data", {"jax.value_and_grad(": "jaxmotion.value_and_grad("}),
  "low_rank_tuning": (
    "data",
    {"nnx.value_and_grad(": "jaxmotion.nnx.value_and_grad("},
  ),
  "sharded_llama": (
    "dp",
    {
      "jax.value_and_grad(loss_and_accuracy, has_aux=True)": (
        "jaxmotion.value_and_grad("
        "loss_and_accuracy, has_aux=True, axis_name='dp')"
      )
    },
  ),
}


def adapt(name, codec):
  """Returns the trainer with an exchange, and how many lines changed."""
  axis, changes = TRAINERS[name]
  source = inspect.getsource(importlib.import_module(f"tests.adapters.{name}"))
  lines, changed = source.splitlines(), 0
  for i, line in enumerate(lines):
    for old, new in changes.items():
      if old in line:
        lines[i], changed = line.replace(old, new), changed + 1
  # Before the first line of the step, which follows the optimizer.
  place = next(
    i for i, s in enumerate(lines) if s.endswith(("jit", "(state, batch):"))
  )
  lines.insert(
    place, f"  tx = optax.chain(jaxmotion.exchange({axis!r}, CODEC), tx)"
  )
  scope = {"__name__": name, "jaxmotion": jaxmotion, "CODEC": codec}
  exec(compile("\n".join(lines), name, "exec"), scope)
  return scope["train"], changed + 1


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_logs_what_it_logged_and_trains_as_before(name):
  plain = importlib.import_module(f"tests.adapters.{name}")
  params, log = plain.train(STEPS)
  train, changed = adapt(name, codecs.identity())
  assert changed <= 3
  own, own_log = train(STEPS)
  for a, b in zip(own_log, log, strict=True):
    for key in b:
      np.testing.assert_allclose(a[key], b[key], rtol=2e-6, err_msg=key)
  for a, b in zip(*map(jax.tree.leaves, (own, params)), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6 * float(np.abs(b).max()))
  _, near_log = adapt(name, INT8)[0](STEPS)
  np.testing.assert_allclose(near_log[-1]["loss"], log[-1]["loss"], rtol=0.03)
