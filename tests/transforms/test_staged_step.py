"""Steps of several programs, which send while they compute."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import jaxmotion
from jaxmotion import codecs
from jaxmotion.collectives import _pieces
from jaxmotion.collectives.extend import send_in_pieces
from jaxmotion.program import cut_at_collectives
from jaxmotion.transforms import _staged_step
from tests.transforms import staged_worker
from tests.transforms.test_processes import run_in_processes

RNG = np.random.default_rng(0)
PARAMS = {
  f"layer{i}": RNG.normal(size=(16, 16)).astype(np.float32) / 4
  for i in range(4)
} | {"scale": np.ones(16, np.float32)}
BATCH = {
  "x": RNG.normal(size=(16, 16)).astype(np.float32),
  "y": RNG.normal(size=(16, 16)).astype(np.float32),
}
INT4 = codecs.feedback(codecs.uniform(bits=4, block=16))


def loss_fn(params, batch):
  y = batch["x"] * params["scale"][None]
  for i in range(4):
    y = jnp.tanh(y @ params[f"layer{i}"])
  return jnp.mean((y - batch["y"]) ** 2)


def make_step(workers, codec, tail, kind=AxisType.Auto, **options):
  devices = np.array(jax.devices()[:workers])
  mesh = Mesh(devices, ("data",), axis_types=(kind,))
  tx = optax.chain(jaxmotion.exchange("data", codec), tail)
  return mesh, *jaxmotion.data_parallel(
    loss_fn, tx, mesh, donate=False, **options
  )


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
  monkeypatch.setattr(_pieces, "_MIN_PIECE_BYTES", 64)
  monkeypatch.setattr("jaxmotion.program._stages._MIN_GROUP_BYTES", 16)


# Steps are powers of two: XLA may round a product and a sum once or twice.
SGD = optax.sgd(0.125, 0.5)


@pytest.mark.parametrize(
  ("workers", "codec", "tail", "kind", "sending"),
  [
    (2, codecs.identity(), SGD, AxisType.Explicit, 1),
    (2, INT4, SGD, AxisType.Auto, 3),
    (2, codecs.low_rank(rank=1), SGD, AxisType.Auto, 2),
    (
      2,
      codecs.cast("bfloat16"),
      optax.chain(optax.clip_by_global_norm(0.125), SGD),
      AxisType.Auto,
      3,
    ),
    (4, INT4, SGD, AxisType.Auto, 6),
  ],
  ids=("sums", "memory", "rounds", "norm of all", "two phases"),
)
def test_the_programs_of_a_step_compute_its_bits(
  workers, codec, tail, kind, sending
):
  mesh, init, step = make_step(workers, codec, tail, kind)
  args = (*init(PARAMS), BATCH)
  with send_in_pieces(3):
    stages = cut_at_collectives(jax.make_jaxpr(step)(*args), mesh)
  count = sum(program.sends for program in stages.programs)
  assert count == sending
  leaves = jax.tree.leaves(args)
  arrays = dict(zip(stages.inputs, leaves, strict=True)) | stages.constants
  for program in stages.programs:
    made = jax.jit(program.run)(*[arrays[i] for i in program.reads])
    arrays.update(zip(program.makes, made, strict=True))
  expected = jax.tree.leaves(step(*args))
  for i, leaf in zip(stages.outputs, expected, strict=True):
    np.testing.assert_array_equal(arrays[i], leaf)


def test_processes_compute_the_bits_of_one_program():
  first, second = run_in_processes(2, (), staged_worker.__name__)
  for name in staged_worker.CODECS:
    for found in (first[name], second[name]):
      assert found["thread"] == found["swaps"] == found["program"], name
    # Parameters and the loss; error memory is each worker's own.
    assert first[name]["thread"][0] == second[name]["thread"][0]
  # Processes that measured differently have agreed.
  assert first["swap_bytes"] == second["swap_bytes"] >= 0


def test_one_worker_computes_what_one_program_computes():
  found = []
  for overlap in ("program", "thread"):
    _, init, step = make_step(1, INT4, SGD, overlap=overlap)
    state = init(PARAMS)
    for _ in range(2):
      *state, loss = step(*state, BATCH)
    found.append((state, loss))
  jax.tree.map(np.testing.assert_array_equal, *found)


def test_the_buffers_of_donated_arguments_are_gone():
  mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
  tx = optax.chain(jaxmotion.exchange("data", INT4), SGD)
  init, step = jaxmotion.data_parallel(loss_fn, tx, mesh, overlap="thread")
  params, state = init(PARAMS)
  step(params, state, BATCH)
  assert all(x.is_deleted() for x in jax.tree.leaves((params, state)))


def test_threads_are_refused_for_several_devices():
  with pytest.raises(ValueError, match="`overlap` must be 'program' .* for 4"):
    make_step(4, INT4, SGD, overlap="thread")


@pytest.mark.parametrize("pieces", [1, 3])
def test_parameters_are_updated_in_their_own_buffers(monkeypatch, pieces):
  monkeypatch.setattr(_staged_step, "_MOST_PIECES", pieces)
  mesh, init, step = make_step(2, INT4, SGD)
  args = (*init(PARAMS), BATCH)
  staged = _staged_step.StagedStep(step, step, mesh, donated=2)
  plan = staged._make_plan(args, {})
  arrays = dict(zip(plan.stages.inputs, jax.tree.leaves(args), strict=True))
  arrays |= plan.stages.constants
  for program in plan.programs:
    reads = [arrays[i] for i in program.stage.reads]
    # JAX warns, which is an error here, of donated buffers that nothing takes.
    hlo = program.run.lower(*reads).compile().as_text()
    assert "f32[16,16]{1,0} copy(" not in hlo
    made = jax.jit(program.stage.run)(*reads)
    arrays.update(zip(program.stage.makes, made, strict=True))
