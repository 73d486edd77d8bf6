"""Trainers of other people's styles, before and after compression."""

import contextlib
import difflib
import importlib
import inspect
import re

import jax
import numpy as np
import pytest

from examples import parts
from jaxmotion import codecs
from tests.paths import ROOT

# Styles, and why a trainer's sums are not in the order of the exchange: None if
# they are, and its parameters then equal the compressed ones bit for bit.
_WHOLE = "one device sums over the examples of all workers"
SUMS: dict[str, str | None] = {
  "pmap_train_state": None,
  "shard_map_step": None,
  "sharded_batch": "the order of sums in two programs depends on the processor",
  "nnx_loop": _WHOLE,
  "linen_train_state": "XLA's order of sums of statistics, which is not ours",
  "language_model": _WHOLE,
  "plain_loop": _WHOLE,
  "module_pytree": _WHOLE,
  "sharded_model": "XLA sums over workers at each product, not once",
  "recurrent_dropout": "JAX sums over workers at each column, not once",
}
STYLES = tuple(SUMS)
# Styles that the page only names: each changes like one that it shows.
ALIKE = {
  "sharded_model": "sharded_batch",
  "module_pytree": "plain_loop",
  "language_model": "linen_train_state",
  "recurrent_dropout": "linen_train_state",
}
INT8 = codecs.feedback(codecs.uniform(bits=8, block=64))
STEPS = 6


# A language model has a command line of its own.
SMALL = (
  *("--steps=6", "--warmup_ratio=0.3", "--batch_size=8", "--block_size=8"),
  *("--n_layer=1", "--n_head=2", "--n_embd=16", "--dropout=0"),
  *("--learning_rate=0.1", "--logging_steps=6"),
)


def load(style, suffix=""):
  return importlib.import_module(f"examples.{style}{suffix}")


def run(module, codec=None):
  config = parts.make_config(codec)
  if not hasattr(module, "parse_arguments"):
    sets_mesh = "jax.set_mesh" in inspect.getsource(module)
    # The mesh that it sets must not outlive it.
    with jax.set_mesh(config.mesh) if sets_mesh else contextlib.nullcontext():
      return module.train(parts.make_batches(STEPS), config)
  vars(config).update(vars(module.parse_arguments(SMALL)))
  return module.train(module.make_batches(config), config)


def code_lines(module):
  """Lines of a trainer without its imports and blank lines."""
  lines = inspect.getsource(module).splitlines()
  first = next(
    i for i, s in enumerate(lines) if s.startswith(("def", "class", "@"))
  )
  return [line for line in lines[first:] if line.strip()]


def changed_lines(old, new):
  """Returns how many lines an editor changes, removes or adds."""
  matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
  return sum(
    max(i2 - i1, j2 - j1)
    for kind, i1, i2, j1, j2 in matcher.get_opcodes()
    if kind != "equal"
  )


@pytest.mark.parametrize("style", STYLES)
def test_the_page_shows_the_lines_that_change_and_these_are_three_at_most(
  style,
):
  old, new = code_lines(load(style)), code_lines(load(style, "_compressed"))
  assert changed_lines(old, new) <= 3
  page = (ROOT / "docs" / "adapters.md").read_text()
  shown = dict(re.findall(r"`(\w+)\.py`\n\n```diff\n(.*?)```", page, re.DOTALL))
  assert sorted(shown) == sorted(set(STYLES) - set(ALIKE))
  if style in ALIKE:
    found = re.search(rf"`{style}\.py`.*?\slike\s`(\w+)\.py`", page, re.DOTALL)
    assert found[1] == ALIKE[style]
    return
  lines = difflib.unified_diff(old, new, n=0, lineterm="")
  changed = [s for s in lines if not s.startswith(("---", "+++", "@@"))]
  assert shown[style].splitlines() == changed


@pytest.mark.parametrize("style", STYLES)
def test_a_trainer_trains_as_before(style):
  compressed = load(style, "_compressed")
  params, losses = run(load(style))
  same, same_losses = run(compressed, codecs.identity())
  tolerance = 1e-6 if SUMS[style] else 0
  np.testing.assert_allclose(same_losses, losses, rtol=tolerance)
  assert losses[-1] < 0.8 * losses[0]
  for a, b in zip(*map(jax.tree.leaves, (params, same)), strict=True):
    np.testing.assert_allclose(
      b, a, rtol=0, atol=tolerance * float(np.abs(a).max())
    )
  if style == "language_model":
    return  # Its many shapes would each compile a program of INT8.
  near, near_losses = run(compressed, INT8)
  np.testing.assert_allclose(near_losses, losses, rtol=0.05)
  for c in jax.tree.leaves(near):
    if style == "pmap_train_state":
      copies = list(c)
    else:
      first, *_ = shards = c.addressable_shards
      copies = [s.data for s in shards if s.index == first.index]
    for copy in copies:
      np.testing.assert_array_equal(copy, copies[0])
