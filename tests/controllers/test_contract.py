"""What holds for every controller."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import controllers
from tests.compilations import compilations
from tests.controllers.runs import run

STEPS, GROUPS = 60, 3


def signals():
  """Numbers that make every controller below switch."""
  rng = np.random.default_rng(0)
  falling = 10 * np.cumprod(1 + rng.normal(-0.01, 0.02, (STEPS, GROUPS)), 0)
  errors = 10 ** rng.uniform(-6, 0, (STEPS, GROUPS))
  turns = np.linspace(0, 6 * np.pi, STEPS)[:, None] + np.arange(GROUPS)
  transfer = rng.uniform(0.9, 1.1, (STEPS, GROUPS))
  seconds = transfer, 2 + 1.5 * np.sin(turns)
  return [np.asarray(a, np.float32) for a in (falling, errors, *seconds)]


NORMS, ERRORS, TRANSFER, COMPUTE = signals()
TIMES = controllers.Times(TRANSFER, COMPUTE)
TABLE = {
  "awp": (controllers.awp(threshold=0.0, interval=5), NORMS),
  "awp_options": (
    controllers.awp(
      threshold=-0.01,
      interval=3,
      window=4,
      counter="consecutive",
      reference="last_reset",
    ),
    NORMS,
  ),
  "error_budget": (controllers.error_budget(budget=0.1, patience=2), ERRORS),
  "bandwidth": (
    controllers.bandwidth(level_bytes=(1, 2, 3, 4), patience=2, decay=0.5),
    TIMES,
  ),
}
ADAPTIVE = pytest.mark.parametrize("name", list(TABLE))
TABLE["fixed"] = (controllers.fixed(2), NORMS)
ALL = pytest.mark.parametrize("name", list(TABLE))


def at(signals, i):
  return jax.tree.map(lambda a: a[i], signals)


def same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def with_first(name):
  controller, values = TABLE[name]
  return controller, at(values, 0), at(values, slice(1, None))


@functools.cache
def whole(name):
  return run(*with_first(name))


@ALL
def test_steps_of_one_program_go_on_from_a_file(name, tmp_path):
  controller, first, values = with_first(name)
  update = jax.jit(controller.update)
  state = update(at(values, 0), controller.init(first))
  before = compilations()
  for i in range(1, STEPS - 1):
    state = update(at(values, i), state)
    leaves, treedef = jax.tree.flatten(state)
    # A step that donates its state donates each array once.
    assert len({id(a) for a in leaves}) == len(leaves)
    if i == 20:
      assert all(a.size for a in leaves)  # some checkpoints refuse empty ones
      np.savez(tmp_path / "state.npz", *leaves)
      with np.load(tmp_path / "state.npz") as file:
        state = treedef.unflatten([file[key] for key in file.files])
  assert compilations() == before
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
    state,
    whole(name)[0],
  )


@ALL
def test_runs_can_be_vmapped_and_groups_do_not_affect_one_another(name):
  controller, first, values = with_first(name)
  pair = lambda a: jnp.stack([a, a[..., [1, 1, 1]]], axis=-2)
  state, levels = jax.vmap(
    lambda f, v: run(controller, f, v), in_axes=(0, 1), out_axes=(0, 0)
  )(jax.tree.map(pair, first), jax.tree.map(pair, values))
  same((at(state, 0), levels[0]), whole(name))
  for group in range(GROUPS):
    same(levels[1][:, group], levels[0][:, 1])


@ADAPTIVE
def test_what_is_not_finite_changes_nothing_and_is_counted(name):
  controller, first, values = with_first(name)
  state, levels = whole(name)
  # The same signals, with bad ones for group 1 in three steps more.
  steps = np.insert(np.arange(STEPS - 1), [10, 30, 40], 0)
  places = np.array([10, 31, 42])

  def spoil(a):
    a = a[steps].copy()
    a[places, 1] = [np.nan, np.inf, -np.inf]
    return a

  spoiled, seen = run(controller, first, jax.tree.map(spoil, values))
  kept = np.delete(np.asarray(seen), places, 0)
  same(kept[:, 1], levels[:, 1])
  same(seen[places, 1], seen[places - 1, 1])
  assert spoiled.history.skipped.tolist() == [0, 3, 0]
  assert int(spoiled.history.step) == STEPS + 2
  own = lambda tree: jax.tree.map(lambda a: a[1], tree[1:])
  same(own(spoiled), own(state))


@ALL
def test_the_history_holds_every_level_change(name):
  controller, first, _ = with_first(name)
  state, levels = whole(name)
  assert name == "fixed" or int(state.history.total.max()) > 2
  leaves = jax.tree.leaves(controller.init(first))
  assert len({id(a) for a in leaves}) == len(leaves)
  start = np.asarray(controller.level(controller.init(first)))
  seen = np.concatenate([start[None], levels])
  assert seen.dtype == np.int32
  assert state.history.dropped.tolist() == [0] * GROUPS
  told = np.zeros_like(seen)
  for change in controllers.level_changes(state.history):
    told[change.step :, change.group] = change.level
  same(told, seen)


@ADAPTIVE
def test_a_signal_of_another_shape_is_named(name):
  controller, first, values = with_first(name)
  state = controller.init(first)
  with pytest.raises(ValueError, match=r"`signal.*` must be float32\[3\], got"):
    controller.update(jax.tree.map(lambda a: a[0, :2], values), state)
  with pytest.raises(ValueError, match=r"`signal.*` must be float32\[groups\]"):
    controller.init(jax.tree.map(lambda a: a[0], first))


@ALL
def test_a_controller_is_its_configuration(name):
  controller, _ = TABLE[name]
  again = eval(repr(controller), dict(vars(controllers)))
  assert again == controller and hash(again) == hash(controller)


def test_a_fixed_level_takes_any_signal_and_stays():
  controller = controllers.fixed(1)
  for signal in (
    jnp.full(2, jnp.nan),
    controllers.Times(jnp.ones(2), jnp.ones(2)),
  ):
    state = controller.update(signal, controller.init(signal))
    assert controller.level(state).tolist() == [1, 1]
    assert int(state.history.step) == 1


@pytest.mark.parametrize(
  ("name", "options", "message"),
  [
    ("awp", {"threshold": -2.0}, r"a number in \[-1, .*got -2.0"),
    ("bandwidth", {"level_bytes": (2, 2)}, "rise"),
    ("bandwidth", {"level_bytes": (1.5,)}, "an int"),
    ("bandwidth", {"decay": 1.0}, r"a number in \[0, 1\)"),
    ("bandwidth", {"margin": 1.1}, r"a number in \(0, 1\]"),
    ("error_budget", {"growth": 0.5}, r"a number in \[1, "),
  ],
)
def test_bad_options_are_named(name, options, message):
  # tests/arguments tries what is wrong for any number.
  match = f"`{next(iter(options))}.*` must (be )?{message}"
  with pytest.raises((TypeError, ValueError), match=match):
    dataclasses.replace(TABLE[name][0], **options)
