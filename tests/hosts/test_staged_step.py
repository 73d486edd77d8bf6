"""Steps of several programs, which send while they compute."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jaxmotion
from jaxmotion import codecs
from jaxmotion.collectives import _layout
from jaxmotion.hosts import Sending, StagedStep, _sending, mark_computed
from jaxmotion.hosts._stages import cut_at_collectives
from tests.hosts import staged_worker
from tests.hosts.test_stages import run_cut
from tests.meshes import mesh_of
from tests.transforms.test_processes import run_in_processes

RNG = np.random.default_rng(0)
PARAMS = {
  f"layer{i}": RNG.normal(size=(16, 16)).astype(np.float32) / 4
  for i in range(3)
} | {"scale": np.ones(16, np.float32)}
BATCH = {
  "x": RNG.normal(size=(16, 16)).astype(np.float32),
  "y": RNG.normal(size=(16, 16)).astype(np.float32),
}
INT4 = codecs.feedback(codecs.uniform(bits=4, block=16))


def loss_fn(params, batch):
  y = batch["x"] * params["scale"][None]
  for i in range(3):
    y = jnp.tanh(y @ params[f"layer{i}"])
  return jnp.mean((y - batch["y"]) ** 2)


def make_step(workers, scheme, kind=AxisType.Auto, loss_fn=loss_fn, **options):
  mesh = mesh_of(workers, kind=kind)
  options = {"donate": False} | options
  return mesh, *jaxmotion.make_train_step(loss_fn, scheme, mesh, **options)


def exchange(codec, tail):
  return optax.chain(jaxmotion.exchange("data", codec), tail)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
  monkeypatch.setattr(_sending, "_MIN_PIECE_BYTES", 64)
  monkeypatch.setattr("jaxmotion.hosts._stages._MIN_GROUP_BYTES", 16)
  # A matrix to a stack.
  monkeypatch.setattr(_layout, "_MAX_STACK_ELEMENTS", 256)


# Steps are powers of two: XLA may round a product and a sum once or twice.
SGD = optax.sgd(0.125, 0.5)


CLIPPED = optax.chain(optax.clip_by_global_norm(0.125), SGD)
SWAPS = Sending(3, swap_bytes=float("inf"))


@pytest.mark.unoptimized
@pytest.mark.parametrize(
  ("workers", "codec", "tail", "sending", "count"),
  [
    (2, codecs.identity(), SGD, Sending(3), 1),
    (2, INT4, CLIPPED, SWAPS, 3),
    (2, codecs.low_rank(rank=1), SGD, Sending(3), 2),
    (4, INT4, SGD, Sending(3), 6),
  ],
  ids=("sums", "norm of all", "rounds", "two phases"),
)
def test_the_programs_of_a_step_compute_its_bits(
  workers, codec, tail, sending, count
):
  kind = AxisType.Explicit if count == 1 else AxisType.Auto
  _, init, step = make_step(workers, exchange(codec, tail), kind)
  args = (init(PARAMS), BATCH)
  found, kinds, _ = run_cut(functools.partial(step, sending=sending), *args)
  assert kinds.count("s") == count
  # XLA fuses products and sums of factors in other ways, and rounds otherwise.
  rtol = 1e-6 if isinstance(codec, codecs.low_rank) else 0
  for a, b in zip(found, jax.tree.leaves(step(*args)), strict=True):
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 100)


@pytest.mark.slow
def test_processes_compute_the_bits_of_one_program():
  first, second = run_in_processes(2, (), staged_worker.__name__)
  for name in staged_worker.CODECS:
    for found in (first[name], second[name]):
      assert all(way == found["program"] for way in found.values()), name
    # Parameters and the loss; error memory is each worker's own.
    assert first[name]["thread"][0] == second[name]["thread"][0]
  # Processes that measured differently have agreed.
  assert first["swap_bytes"] == second["swap_bytes"] >= 0


@pytest.mark.unoptimized
def test_one_worker_computes_what_one_program_computes():
  # Functions inside of a loss may close over arrays.
  row = np.linspace(1, 2, 16, dtype=np.float32)[None]
  scale = jax.jit(lambda x: x * row)
  scaled_loss = lambda params, batch: loss_fn(
    params, batch | {"x": scale(batch["x"])}
  )
  found = []
  for overlap in ("program", "thread"):
    options = dict(loss_fn=scaled_loss, overlap=overlap, donate=True)
    _, init, step = make_step(1, exchange(INT4, SGD), **options)
    first = init(PARAMS)
    state, _ = step(first, BATCH)
    found.append(step(state, BATCH))
    assert all(x.is_deleted() for x in jax.tree.leaves((first, state)))
  jax.tree.map(np.testing.assert_array_equal, *found)


def test_parameters_are_updated_in_their_own_buffers():
  mesh, init, step = make_step(2, exchange(INT4, SGD))
  args = (init(PARAMS), BATCH)
  staged = StagedStep(step, step, mesh, donated=1)
  plan = staged._make_plan(args, {})
  arrays = dict(zip(plan.stages.inputs, jax.tree.leaves(args), strict=True))
  arrays |= plan.stages.constants
  for program in plan.programs:
    reads = [arrays[i] for i in program.stage.reads]
    # JAX warns, which is an error here, of donated buffers that nothing takes.
    hlo = program.run.lower(*reads).compile().as_text()
    assert "f32[16,16]{1,0} copy(" not in hlo
    made = jax.eval_shape(program.stage.run, *reads)
    arrays.update(zip(program.stage.makes, made, strict=True))


@pytest.mark.parametrize("mean_loss", [True, False])
def test_a_delayed_gradient_is_sent_before_the_next_one_is_computed(mean_loss):
  scheme = jaxmotion.delayed(exchange(INT4, SGD))
  _, init, step = make_step(2, scheme, mean_loss=mean_loss)
  args = (init(PARAMS), BATCH)
  stages = cut_at_collectives(
    jax.make_jaxpr(functools.partial(step, sending=Sending(3)))(*args)
  )
  made = {*stages.inputs, *stages.constants}
  for program in stages.programs:
    assert made.issuperset(program.reads)
    made.update(program.makes)
  names = [{node.step.name for node in p.nodes} for p in stages.programs]
  kinds = "".join(
    "s" if program.sends else "m" if "dot_general" in own else "c"
    for program, own in zip(stages.programs, names, strict=True)
  )
  # The forward pass is before the loss is sent, the backward pass behind it.
  assert kinds == ("cscscsmsmcccc" if mean_loss else "cscscsmccc")


def test_what_the_next_step_needs_does_not_wait_for_a_flight():
  mesh = mesh_of(1)

  def update(state, turns):
    own, shared, kept = state
    change = mark_computed(own * 2)
    total = shared + jax.lax.psum(change, "data")
    run_long = lambda i, x: jnp.tanh(x @ x)
    shared = jax.lax.fori_loop(0, turns, run_long, total)
    return own + 1, shared, kept

  def step(state, turns, sending):
    assert sending.phase == 7
    specs = (P("data"), P(), P())
    return jax.shard_map(
      update, mesh=mesh, in_specs=(specs, P()), out_specs=specs
    )(state, turns)

  run = jax.jit(step, donate_argnums=0)
  staged = StagedStep(step, run, mesh, 1, own=lambda state: state[0])
  sending = Sending(phase=7)
  state = tuple(jnp.ones((256, 256)) for _ in range(3))
  state = jax.block_until_ready(staged(state, 1, sending=sending))
  own, shared, kept = staged(state, 300, sending=sending)
  own.block_until_ready()
  assert not shared.is_ready()
  # What no program writes to is handed on; all else is gone.
  assert [x.is_deleted() for x in state] == [True, True, False]
  assert kept is state[2]
  np.testing.assert_array_equal(own, 3.0)
  assert np.isfinite(shared).all()


def test_a_flight_with_effects_is_sent_whole():
  mesh = mesh_of(1)
  seen = []

  def update(x):
    jax.debug.callback(seen.append, x[0])
    return x + 1, jax.lax.psum(x, "data")

  def step(x, sending):
    return jax.shard_map(
      update, mesh=mesh, in_specs=P("data"), out_specs=(P("data"), P())
    )(x)

  run = jax.jit(step)
  staged = StagedStep(step, run, mesh, 0, own=lambda made: made[0])
  x, sending = jnp.arange(4.0), Sending(phase=0)
  found = jax.block_until_ready(staged(x, sending=sending))
  jax.effects_barrier()
  jax.tree.map(np.testing.assert_array_equal, found, (x + 1, x))
  assert list(map(float, seen)) == [0.0]


@pytest.mark.unoptimized
@pytest.mark.parametrize("specs", [None, {"w": P(None, "model")}], ids=str)
def test_a_mesh_may_have_axes_of_one_device(specs):
  mesh = mesh_of(1, 1)
  chain = optax.chain(jaxmotion.exchange("data"), SGD)
  scheme = jaxmotion.local_updates(SGD, chain, every=2, delay=1)
  found = []
  for overlap in ("program", "thread"):
    init, step = jaxmotion.make_train_step(
      lambda params, x: jnp.mean((x @ params["w"]) ** 2),
      chain if specs is None else scheme,
      mesh,
      specs=specs,
      overlap=overlap,
    )
    state = init({"w": jnp.ones((4, 4))})
    for _ in range(4):
      state, loss = step(state, jnp.ones((2, 4)))
    found.append((state, loss))
  jax.tree.map(np.testing.assert_array_equal, *found)
