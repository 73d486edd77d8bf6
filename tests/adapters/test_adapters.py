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
  "sharded_gemma": (
    "data",
    {"jax.value_and_grad(": "jaxmotion.value_and_grad("},
  ),
  "small_decoder": (
    "data",
    {
      "jax.value_and_grad(": "jaxmotion.value_and_grad(",
      "optax.tree.norm(grads)": "optax.tree.get(state.opt_state, 'norm')",
    },
  ),
  "filtered_modules": (
    "data",
    {
      "loss, grads = eqx.filter_value_and_grad(compute_loss)(model, x, y)": (
        "arrays, rest = eqx.partition(model, eqx.is_inexact_array); "
        "loss, grads = jaxmotion.value_and_grad(lambda arrays: "
        "compute_loss(eqx.combine(arrays, rest), x, y))(arrays)"
      ),
    },
  ),
}
# What is logged of gradients is logged of the mean that the exchange returns.
NORM = ", optax.snapshot('norm', optax.tree.norm)"


@pytest.fixture(autouse=True)
def _allow_rank_promotion():
  """Trainers of other people promote ranks."""
  with jax.numpy_rank_promotion("allow"):
    yield


def adapt(name, codec):
  """Returns the trainer with an exchange, and how many lines changed."""
  axis, changes = TRAINERS[name]
  source = inspect.getsource(importlib.import_module(f"tests.adapters.{name}"))
  lines, changed = source.splitlines(), 0
  for i, line in enumerate(lines):
    for old, new in changes.items():
      if old in line:
        lines[i] = line.replace(old, new)
        changed += 1 + new.count(";")
  # Behind the optimizer.
  start = next(i for i, s in enumerate(lines) if s.startswith("  tx = "))
  place = next(i for i in range(start, len(lines)) if lines[i].endswith(")"))
  if lines[start].endswith("("):
    place = lines.index("  )", start)
  norm = NORM if "'norm'" in str(changes) else ""
  lines.insert(
    place + 1,
    f"  tx = optax.chain(jaxmotion.exchange({axis!r}, CODEC){norm}, tx)",
  )
  scope = {"__name__": name, "jaxmotion": jaxmotion, "CODEC": codec}
  exec(compile("\n".join(lines), name, "exec"), scope)
  return scope["train"], changed + 1


def train_plainly(name):
  return importlib.import_module(f"tests.adapters.{name}").train(STEPS)


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_logs_what_it_logged_and_trains_as_before(name):
  params, log = train_plainly(name)
  train, changed = adapt(name, codecs.identity())
  assert changed <= 3
  own, own_log = train(STEPS)
  for a, b in zip(own_log, log, strict=True):
    for key in b:
      np.testing.assert_allclose(a[key], b[key], rtol=2e-6, err_msg=key)
  for a, b in zip(*map(jax.tree.leaves, (own, params)), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6 * float(np.abs(b).max()))


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_trains_nearly_so_in_8_bits(name):
  _, log = train_plainly(name)
  _, near = adapt(name, INT8)[0](STEPS)
  np.testing.assert_allclose(near[-1]["loss"], log[-1]["loss"], rtol=0.03)
