"""Workers that update by themselves, against NumPy and against other steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jaxmotion
from jaxmotion import codecs, wire
from tests.transforms import local_reference as reference

WORKERS = 4
ROWS = 2 * WORKERS
MESH = Mesh(np.array(jax.devices()[:WORKERS]), ("data",))
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


def assert_trees_close(found, expected, tolerance=1e-6):
  for name, a in expected.items():
    np.testing.assert_allclose(found[name], a, atol=tolerance, rtol=0)


def tree_bits(tree):
  return [np.asarray(a).tobytes() for a in jax.tree.leaves(tree)]


def check_against_numpy(every, fragments, delay, mix, weighted=False, steps=15):
  options = dict(every=every, fragments=fragments, delay=delay, mix=mix)
  weight_fn = (lambda batch: batch["tokens"].sum()) if weighted else None
  state = run(*make_steps(**options, weight_fn=weight_fn), steps)
  anchor, own = reference.train(
    reference.make_params(),
    [reference.make_batch(i, ROWS) for i in range(steps)],
    workers=WORKERS,
    weighted=weighted,
    **options,
  )
  assert_trees_close(state.params, anchor)
  for r in range(WORKERS):
    assert_trees_close(own_params(state, r), own[r])


# It holds for all of `reference.grid()`, each of which takes 2 s.
@pytest.mark.parametrize(
  ("case", "weighted"),
  [
    ((1, 1, 0, 0.0), False),
    ((4, 2, 1, 0.5), True),
    ((6, 3, 0, 0.0), False),
    ((6, 3, 3, 0.5), True),
    ((4, 1, 3, 0.0), False),
  ],
  ids=str,
)
def test_it_is_the_reference_in_numpy(case, weighted):
  assert case in set(reference.grid())
  check_against_numpy(*case, weighted)


def test_an_exchange_at_every_step_is_data_parallel_training():
  outer = optax.chain(jaxmotion.exchange("data"), optax.sgd(1.0))
  found = run(*make_steps(optax.sgd(0.1), outer, every=1), 5)
  tx = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1))
  init, step = jaxmotion.make_train_step(loss_fn, tx, MESH)
  state = init(reference.make_params())
  for i in range(5):
    state, _ = step(state, reference.make_batch(i, ROWS))
  assert_trees_close(found.params, state.params)


def test_a_quiet_step_sends_the_loss_and_a_due_one_a_fragment():
  exchange_alone = jaxmotion.exchange("data", INT4)
  batch = reference.make_batch(0, ROWS)
  params = reference.make_params()
  options = dict(every=6, fragments=3, delay=1, nonfinite="propagate")
  bytes_of = {}
  for mean_loss in (True, False):
    init, step = make_steps(
      outer=make_outer(INT4), mean_loss=mean_loss, **options
    )
    compiled = step.lower(init(params), batch).compile()
    for branch in range(2):
      bytes_of[mean_loss, branch] = wire.compiled_bytes(
        compiled, branch=branch
      ).total_bytes
  assert bytes_of[False, 0] == 0
  loss = bytes_of[True, 0]
  assert loss == 2 * 3 / 4 * 4
  assert bytes_of[True, 1] == bytes_of[False, 1] + loss
  # The same exchange at every step, of one leaf after the other.
  init, step = jaxmotion.make_train_step(
    lambda params, batch: sum(
      jnp.sum(a * batch["x"].sum()) for a in jax.tree.leaves(params)
    ),
    optax.chain(
      *(
        optax.masked(exchange_alone, {k: k == name for k in params})
        for name in params
      )
    ),
    MESH,
    mean_loss=False,
  )
  compiled = step.lower(init(params), batch).compile()
  plain = wire.compiled_bytes(compiled).total_bytes
  assert bytes_of[False, 1] == plain > 0


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
  assert tree_bits((state.params, state.opt_state.outer)) == tree_bits(
    (before.params, before.opt_state.outer)
  )
  anchor = jax.tree.map(np.asarray, state.params)
  for worker in range(WORKERS):
    own = own_params(state, worker)
    is_anchor = tree_bits(own) == tree_bits(anchor)
    assert is_anchor == (worker == 2)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(own))
  fresh = jax.tree.map(lambda a: np.asarray(a)[2], state.opt_state.inner.value)
  assert not any(np.any(a) for a in jax.tree.leaves(fresh))
  for i in range(4, 6):
    state, loss = step(state, reference.make_batch(i, ROWS))
  assert np.isfinite(loss) and int(state.opt_state.skipped) == 1
  assert tree_bits(state.params) != tree_bits(anchor)
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
  assert tree_bits(state.params) != tree_bits(before.params)


def test_all_workers_hold_the_same_anchor_and_go_on_from_a_copy():
  init, step = make_coded()
  state = run(init, step, 3)
  for leaf in jax.tree.leaves(state.params):
    shards = {np.asarray(s.data).tobytes() for s in leaf.addressable_shards}
    assert len(shards) == 1
  saved = jax.tree.map(np.asarray, state)
  batch = reference.make_batch(3, ROWS)
  expected, _ = step(state, batch)
  found, _ = step(saved, batch)
  assert tree_bits(found) == tree_bits(expected)


@pytest.mark.parametrize(
  "options",
  [
    dict(every=4, fragments=2, delay=1, mix=0.5, weighted=True),
    dict(every=3, delay=2, mean_loss=False),
    # A fragment is due when another one lands, and before another one lands.
    dict(every=4, fragments=2, delay=2, mix=0.5),
    dict(every=4, fragments=2, delay=3, nonfinite="propagate"),
  ],
  ids=str,
)
def test_a_thread_computes_what_one_program_computes(options):
  options = dict(options)
  if options.pop("weighted", False):
    options["weight_fn"] = lambda batch: batch["tokens"].sum()
  mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
  # Powers of two, as XLA may round a product and its sum once or twice.
  outer = optax.chain(jaxmotion.exchange("data", INT4), optax.sgd(0.5, 0.5))
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
    found[overlap] = tree_bits(seen)
  assert found["program"] == found["thread"]


def test_the_host_knows_what_is_due_and_what_lands():
  for every, fragments, delay, mix in reference.grid():
    if mix or not delay:
      continue
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

  mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
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


def test_keys_auxiliary_values_and_parts_of_a_batch():
  def noisy_loss(params, batch, key):
    noise = jax.random.uniform(key)
    return loss_fn(params, batch), {"noise": noise, "rows": len(batch["x"])}

  init, step = jaxmotion.make_train_step(
    noisy_loss,
    jaxmotion.local_updates(INNER, make_outer(), every=2),
    jax.make_mesh((WORKERS,), ("data",)),
    has_aux=True,
    microbatches=2,
    mean_loss=False,
  )
  state = init(reference.make_params())
  key, seen = jax.random.key(0), []
  for i in range(2):
    batch = reference.make_batch(i, ROWS)
    state, (loss, aux) = step(state, batch, key=key)
    assert loss.shape == (WORKERS,)
    seen.append(np.asarray(aux["noise"]))
  assert len({float(a) for noise in seen for a in noise.ravel()}) == 2 * WORKERS


def stateful_loss(params, model_state, batch):
  """Adds up rows, whose number all workers share, and their mean."""
  mean = 0.5 * model_state["mean"] + batch["x"].mean(0)
  rows = model_state["rows"] + len(batch["x"])
  return loss_fn(params, batch), {"mean": mean, "rows": rows}


@pytest.mark.parametrize("kind", ["mean", "local"])
def test_model_state_is_averaged_or_each_workers_own(kind):
  init, step = make_steps(loss=stateful_loss, every=2, model_state=kind)
  params, steps = reference.make_params(), 3
  state = init(params, {"mean": np.zeros(5, np.float32), "rows": np.int32(0)})
  expected = np.zeros((WORKERS, 5))
  for i in range(steps):
    batch = reference.make_batch(i, ROWS)
    state, _ = step(state, batch)
    rows = batch["x"].reshape(WORKERS, ROWS // WORKERS, 5)
    expected = 0.5 * expected + rows.mean(1)
  read = lambda model: model.value if kind == "local" else model
  found = jax.tree.map(np.array, read(state.model_state))
  if kind == "mean":
    expected = expected.mean(0)
  np.testing.assert_allclose(found["mean"], expected, atol=1e-6)
  assert set(np.ravel(found["rows"])) == {steps * ROWS // WORKERS}
  # What the loss returns beside itself does not change how parameters go.
  plain = run(*make_steps(every=2), steps)
  assert_trees_close(state.params, plain.params)
  # Only a worker's own state is kept where it would not be finite.
  state, _ = step(state, poisoned(steps, worker=2))
  kept = np.asarray(read(state.model_state)["mean"])
  assert np.isfinite(kept).all()
  if kind == "local":
    is_kept = (kept == found["mean"]).all(1)
    assert is_kept.tolist() == [r == 2 for r in range(WORKERS)]


@pytest.mark.parametrize(
  ("options", "error", "match"),
  [
    ({"every": 0}, ValueError, "`every` must be"),
    ({"every": 4, "fragments": 3}, ValueError, "`fragments` must divide `ev"),
    ({"every": 4, "delay": 4}, ValueError, "`delay` must be less than `every`"),
    ({"every": 4, "mix": 1.0}, ValueError, "`mix` must be"),
    ({"every": 4, "inner": 0.1}, TypeError, "`inner` must be an optax"),
    ({"every": 4, "outer": "sgd"}, TypeError, "`outer` must be an optax"),
    ({"every": 4, "nonfinite": "zero"}, ValueError, "`nonfinite` must be one"),
    (
      {"every": 4, "overlap": "thread"},
      ValueError,
      "`overlap` must be 'program' without a `delay`",
    ),
    (
      {"every": 4, "delay": 1, "overlap": "thread"},
      ValueError,
      "`overlap` must be 'program' .* got 'thread' for 4",
    ),
  ],
)
def test_wrong_options_are_refused(options, error, match):
  with pytest.raises(error, match=match):
    make_steps(**options)


@pytest.mark.parametrize(
  ("options", "error", "match"),
  [
    ({"fragments": 4}, ValueError, "`fragments` must each have a leaf"),
    (
      {"fragments": 2, "parts": lambda path, shape: 0},
      ValueError,
      r"none in \[1\]",
    ),
    (
      {"fragments": 2, "parts": lambda path, shape: len(shape)},
      ValueError,
      r"`parts\('kernel', .*\)` must be an integer in \[0, 1\], got 2",
    ),
    (
      {"parts": lambda path, shape: "a"},
      TypeError,
      r"`parts\(.*must be an integer",
    ),
    ({"inner": make_outer()}, ValueError, "`inner` must have no exchange"),
    ({"outer": optax.sgd(1.0)}, ValueError, "`outer` must have an exchange"),
  ],
)
def test_what_does_not_fit_the_parameters_is_refused(options, error, match):
  init, _ = make_steps(every=4, **options)
  with pytest.raises(error, match=match):
    init(reference.make_params())


def test_a_donated_state_is_refused():
  init, step = make_steps(every=2)
  state = init(reference.make_params())
  batch = reference.make_batch(0, ROWS)
  step(state, batch)
  with pytest.raises(ValueError, match="`state/.*` must be .* still exists"):
    step(state, batch)
  with pytest.raises(TypeError, match="`state` must be the TrainState that"):
    step({"w": 1.0}, batch)


@pytest.mark.parametrize("overlap", ["program", "thread"])
def test_a_state_of_another_scheme_is_refused(overlap):
  mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
  options = dict(every=2, delay=1, overlap=overlap)
  init, step = make_steps(mesh=mesh, **options)
  state = init(reference.make_params())._replace(opt_state=optax.EmptyState())
  with pytest.raises(TypeError, match="`state/opt_state` must be what `init`"):
    step(state, reference.make_batch(0, ROWS), key=jax.random.key(0))
