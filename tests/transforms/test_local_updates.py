"""Workers that update by themselves, against NumPy and against other steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmotion
from jaxmotion import codecs, wire
from jaxmotion.program import parse_hlo
from jaxmotion.transforms._schemes._local_updates import update_stacked
from tests.collectives.helpers import copies
from tests.meshes import mesh_of
from tests.transforms import local_reference as reference
from tests.transforms.helpers import assert_close, bits

WORKERS = 4
ROWS = 2 * WORKERS
MESH = mesh_of(WORKERS)
INNER = optax.sgd(0.02, momentum=0.9)
INT4 = codecs.feedback(codecs.uniform(bits=4))


def loss_fn(params, batch):
  shift = params["shift"].sum((0, 1))[None]
  h = (batch["x"] @ params["kernel"] + shift) * params["scale"]
  return jnp.mean((h - batch["y"]) ** 2)


def make_outer(codec=None, **options):
  return optax.chain(
    jaxmotion.exchange("data", codec, **options),
    optax.sgd(0.7, momentum=0.9, nesterov=True),
  )


OF_THE_STEP = ("weight_fn", "mean_loss", "overlap", "donate", "model_state")


def make_steps(inner=INNER, outer=None, mesh=MESH, loss=loss_fn, **options):
  own = {name: options.pop(name) for name in OF_THE_STEP if name in options}
  outer = make_outer() if outer is None else outer
  options = {"nonfinite": "skip"} | options
  scheme = jaxmotion.local_updates(inner, outer, **options)
  return jaxmotion.make_train_step(loss, scheme, mesh, **own)


def run(init, step, steps, start=0):
  state = init(reference.make_params())
  for i in range(start, start + steps):
    state, _ = step(state, reference.make_batch(i, ROWS))
  return state


def own_params(state, worker):
  return jax.tree.map(
    lambda a: np.asarray(a)[worker], state.opt_state.params.value
  )


@pytest.mark.parametrize(
  ("case", "weighted"),
  [
    ((1, 1, 0, 0.0), False),
    ((4, 2, 1, 0.25), True),
    ((6, 3, 3, 0.5), True),
    ((4, 1, 3, 0.0), False),
  ],
  ids=str,
)
def test_it_is_the_reference_in_numpy(case, weighted, steps=15):
  options = dict(zip(("every", "fragments", "delay", "mix"), case, strict=True))
  weight_fn = (lambda batch: batch["tokens"].sum()) if weighted else None
  state = run(*make_steps(**options, weight_fn=weight_fn), steps)
  anchor, own = reference.train(
    reference.make_params(),
    [reference.make_batch(i, ROWS) for i in range(steps)],
    workers=WORKERS,
    weighted=weighted,
    **options,
  )
  assert_close(state.params, anchor, rtol=0)
  for r in range(WORKERS):
    assert_close(own_params(state, r), own[r], rtol=0)


def test_a_quiet_step_sends_the_loss_and_a_due_one_a_fragment():
  batch = reference.make_batch(0, ROWS)
  params = reference.make_params()
  options = dict(every=6, fragments=3, delay=1, nonfinite="propagate")
  init, step = make_steps(outer=make_outer(INT4), **options)
  compiled = step.lower(init(params), batch).compile()
  quiet, due = (
    wire.compiled_bytes(compiled, branch=branch).total_bytes
    for branch in range(2)
  )
  # The same exchange at every step, of one leaf after the other.
  exchange = jaxmotion.exchange("data", INT4)
  masks = [{k: k == name for k in params} for name in params]
  init, step = jaxmotion.make_train_step(
    loss_fn, optax.chain(*(optax.masked(exchange, m) for m in masks)), MESH
  )
  plain = wire.step_bytes(step, init(params), batch).total_bytes
  assert quiet == 2 * 3 / 4 * 4 and due == plain > quiet


def poisoned(seed, worker):
  batch = reference.make_batch(seed, ROWS)
  rows = ROWS // WORKERS
  batch["x"][worker * rows : (worker + 1) * rows] = np.nan
  return batch


@functools.cache
def make_coded():
  return make_steps(outer=make_outer(INT4), every=2, donate=False)


def test_a_worker_that_is_not_finite_begins_at_the_anchor_alone():
  init, step = make_coded()
  before = run(init, step, 3)
  state, loss = step(before, poisoned(3, worker=2))
  assert not np.isfinite(loss) and int(state.opt_state.skipped) == 1
  assert bits((state.params, state.opt_state.outer)) == bits(
    (before.params, before.opt_state.outer)
  )
  anchor = jax.tree.map(np.asarray, state.params)
  for worker in range(WORKERS):
    own = own_params(state, worker)
    is_anchor = bits(own) == bits(anchor)
    assert is_anchor == (worker == 2)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(own))
  fresh = jax.tree.map(lambda a: np.asarray(a)[2], state.opt_state.inner.value)
  assert not any(np.any(a) for a in jax.tree.leaves(fresh))
  for i in range(4, 6):
    state, loss = step(state, reference.make_batch(i, ROWS))
  assert np.isfinite(loss) and int(state.opt_state.skipped) == 1
  assert bits(state.params) != bits(anchor)
  assert all(np.isfinite(a).all() for a in jax.tree.leaves(state.params))


def test_a_fragment_that_was_not_sent_does_not_land():
  options = dict(every=4, fragments=2, delay=3, donate=False)
  init, step = make_steps(outer=make_outer(INT4), **options)
  before = run(init, step, 1)
  # Sent at step 2 is fragment 0, which would land at step 5.
  state, _ = step(before, poisoned(1, worker=1))
  assert (
    int(state.opt_state.skipped) == 1
    and state.opt_state.flying[1].tolist() == [False] * 2
  )
  for i in range(2, 5):
    state, _ = step(state, reference.make_batch(i, ROWS))
  assert state.opt_state.flying[1].tolist() == [False, True]
  moved = {
    name: bool(np.any(np.asarray(a) != reference.make_params()[name]))
    for name, a in state.params.items()
  }
  assert not any(moved.values())
  for i in range(5, 9):
    state, _ = step(state, reference.make_batch(i, ROWS))
  assert all(np.isfinite(a).all() for a in jax.tree.leaves(state.params))
  assert bits(state.params) != bits(before.params)


def test_all_workers_hold_the_same_anchor_and_go_on_from_a_copy():
  init, step = make_coded()
  state = run(init, step, 3)
  for leaf in jax.tree.leaves(state.params):
    assert len(copies(leaf)) == 1
  saved = jax.tree.map(np.asarray, state)
  batch = reference.make_batch(3, ROWS)
  expected, _ = step(state, batch)
  found, _ = step(saved, batch)
  assert bits(found) == bits(expected)


@pytest.mark.parametrize(
  "options",
  [
    # A fragment is due when another one lands.
    dict(every=4, fragments=2, delay=2, mix=0.5, weighted=True),
    dict(every=3, delay=2, mean_loss=False, nonfinite="propagate"),
  ],
  ids=str,
)
def test_a_thread_computes_what_one_program_computes(options):
  options, mesh, codec = dict(options), mesh_of(1), None
  if options.pop("weighted", False):
    options["weight_fn"] = lambda batch: batch["tokens"].sum()
    codec = INT4
  # Powers of two, as XLA may round a product and its sum once or twice.
  outer = optax.chain(jaxmotion.exchange("data", codec), optax.sgd(0.5, 0.5))
  found = {}
  for overlap in ("program", "thread"):
    options |= dict(overlap=overlap, donate=overlap == "thread")
    init, step = make_steps(optax.sgd(1 / 64, 0.5), outer, mesh, **options)
    state, seen = init(reference.make_params()), []
    for i in range(8):
      is_bad = i == 5 and "nonfinite" not in options
      batch = poisoned(i, worker=0) if is_bad else reference.make_batch(i, ROWS)
      state, loss = step(state, batch)
      # What is saved during a flight is whole.
      seen.append(jax.tree.map(np.array, (loss, state)))
      if i == 2:
        state = seen[-1][1]
    assert int(state.opt_state.skipped) == int("nonfinite" not in options)
    found[overlap] = bits(seen)
  assert found["program"] == found["thread"]


def test_the_host_knows_what_is_due_and_what_lands():
  for every, fragments, delay in ((1, 1, 0), (4, 2, 1), (4, 2, 3), (6, 3, 2)):
    scheme = jaxmotion.local_updates(
      INNER, make_outer(), every=every, fragments=fragments, delay=delay
    )
    find = scheme._due_fragment
    steps = range(1, 4 * every)
    due, landing = (find(jnp.array(steps), offset) for offset in (0, delay))
    phases = [scheme.find_phase(n) for n in steps]
    assert len(set(phases)) <= 2 * fragments + 1
    assert [find(phase, 0) for phase in phases] == due.tolist()
    # Before the first round lands, nothing that was sent can land.
    landed = [find(phase, delay) for phase in phases]
    assert landed[delay:] == landing.tolist()[delay:]


def test_a_gradient_is_traced_once_for_all_phases():
  calls = []

  def loss(params, batch):
    calls.append(1)
    return loss_fn(params, batch)

  mesh = mesh_of(1)
  init, step = make_steps(
    mesh=mesh, loss=loss, every=4, fragments=2, delay=1, overlap="thread"
  )
  state = run(init, step, 1)
  before = len(calls)
  for i in range(1, 9):
    state, _ = step(state, reference.make_batch(i, ROWS))
  assert len(calls) == before


def test_rules_and_masks_see_the_paths_of_the_whole_tree():
  rules = [("kernel", INT4), ("scale", codecs.identity()), (".*", INT4)]
  outer = optax.chain(
    jaxmotion.exchange("data", codecs.rules(rules)),
    optax.masked(
      optax.set_to_zero(), {"kernel": False, "scale": True, "shift": False}
    ),
    optax.sgd(1.0),
  )
  init, step = make_steps(outer=outer, every=2, fragments=2)
  state = run(init, step, 2)
  params = reference.make_params()
  moved = {
    name: bool(np.any(np.asarray(a) != params[name]))
    for name, a in state.params.items()
  }
  assert moved == {"kernel": True, "scale": False, "shift": True}
  wrong = codecs.rules([("kernle", INT4), (".*", INT4)])
  init, _ = make_steps(outer=make_outer(wrong), every=2, fragments=2)
  with pytest.raises(ValueError, match="got 'kernle', which matches none"):
    init(params)


def stateful_loss(params, model_state, batch):
  """Adds up rows, whose number all workers share, and their mean."""
  mean = 0.5 * model_state["mean"] + batch["x"].mean(0)
  rows = model_state["rows"] + len(batch["x"])
  return loss_fn(params, batch), {"mean": mean, "rows": rows}


@pytest.mark.parametrize("kind", ["mean", "local"])
def test_a_model_state_stays_finite(kind):
  init, step = make_steps(loss=stateful_loss, every=2, model_state=kind)
  start = {"mean": np.zeros(5, np.float32), "rows": np.int32(0)}
  state = init(reference.make_params(), start)
  read = lambda state: jax.tree.map(
    np.array, jax.tree.leaves(state.model_state)
  )
  state, _ = step(state, reference.make_batch(0, ROWS))
  before = read(state)
  after = read(step(state, poisoned(1, worker=2))[0])
  assert np.isfinite(after[0]).all()
  assert set(np.ravel(after[1])) == {2 * ROWS // WORKERS}
  # Only a worker's own state is kept where it would not be finite.
  if kind == "local":
    is_kept = (after[0] == before[0]).all(1)
    assert is_kept.tolist() == [r == 2 for r in range(WORKERS)]


ALL_IN_FIRST = lambda path, shape: 0
REFUSED = {
  "`fragments` must divide `ev": {"fragments": 3},
  "`delay` must be less than `every`": {"delay": 4},
  "`overlap` must be 'program' without a `delay`": {"overlap": "thread"},
  "`overlap` must be 'program' .* got 'thread' for 4": {
    "delay": 1,
    "overlap": "thread",
  },
  # What does not fit the parameters is known to `init` only.
  "`fragments` must each have a leaf": {"fragments": 4},
  r"none in \[1\]": {"fragments": 2, "parts": ALL_IN_FIRST},
  r"`parts\('kernel', .*\)` must be an integer in \[0, 1\], got 2": {
    "fragments": 2,
    "parts": lambda path, shape: len(shape),
  },
  r"`parts\(.*must be an integer .* got 'a'": {
    "parts": lambda path, shape: "a"
  },
  "`inner` must have no exchange": {"inner": make_outer()},
  "`outer` must have an exchange": {"outer": optax.sgd(1.0)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_options_are_refused(message):
  with pytest.raises((TypeError, ValueError), match=message):
    make_steps(every=4, **REFUSED[message])[0](reference.make_params())


def stack(tree):
  return jax.tree.map(lambda a: jnp.asarray(a)[None], tree)


ONE = {"w": np.linspace(-1, 2, 96, dtype=np.float32).reshape(12, 8)}
ADAMW = optax.adamw(0.1)


def update(grads, params, state):
  updates, state = ADAMW.update(grads, state, params)
  return optax.apply_updates(params, updates), state


def branch(grads, params):
  total = jax.lax.cond(
    grads["w"].sum() > 0, lambda p: 2 * p["w"], lambda p: p["w"] - 1, params
  )
  return ({"w": total},)


@pytest.mark.parametrize("run", [update, branch], ids=["straight", "branch"])
def test_stacked_updates_are_those_of_a_worker_by_itself(run):
  args = (ONE, ONE, ADAMW.init(ONE)) if run is update else (ONE, ONE)
  expected = jax.tree.map(lambda a: a[None], jax.jit(run)(*args))
  stacked = jax.jit(lambda *args: update_stacked(run, *args))
  assert_close(stacked(*map(stack, args)), expected)
  # A branch that is batched would run both sides.
  assert ("cond[" in str(stacked.trace(*map(stack, args)).jaxpr)) == (
    run is branch
  )


def test_moments_are_updated_in_their_buffers():
  args = map(stack, (ONE, ONE, ADAMW.init(ONE)))

  def step(grads, params, state):
    # The gradient is a product, as of a layer: one worker's own, without axis.
    grads = stack({"w": grads["w"][0] @ jnp.eye(8)})
    return update_stacked(update, grads, params, state)

  compiled = jax.jit(step, donate_argnums=(1, 2)).lower(*args).compile()
  module = parse_hlo(compiled.as_text())
  copied = [
    i.name
    for i in module.computations[module.entry].values()
    if i.opcode == "copy" and i.type.startswith("f32[1,12,8]")
  ]
  assert not copied
