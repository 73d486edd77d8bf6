"""Codecs that reduce in several rounds, and the driver that runs them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxmotion
from jaxmotion import codecs, collectives, wire
from jaxmotion.codecs import Laws, Message, MultiRoundCodec, Reduced
from jaxmotion.collectives import _rounds
from jaxmotion.collectives._rounds import (
  LeafCodec,
  Round,
  gather_shards,
  run_rounds,
  scatter_means,
  schedule_rounds,
)
from jaxmotion.core import make_key, to_varying
from tests.collectives.helpers import bind, copies, run
from tests.meshes import mesh_of

RNG = np.random.default_rng(0)


@dataclasses.dataclass(frozen=True)
class shared_scale(MultiRoundCodec):
  """Rounds to int8 codes of one scale for all workers; counts its steps."""

  kinds: tuple = ("max", "gather")

  @property
  def laws(self):
    return Laws(bounds_memory=True)

  @property
  def round_kinds(self):
    return self.kinds

  def init(self, like):
    return jaxmotion.Shared(jnp.zeros(()))

  def reduce_in_rounds(self, x, state, key, workers):
    greatest = yield Message("max", jnp.abs(x).max(initial=0))
    step = jnp.where(greatest > 0, greatest / 127, 1)
    codes = (jnp.round(x / step) + 128).astype(jnp.uint8)
    gathered = yield Message("gather", codes)
    total = (gathered.astype(jnp.float32) - 128).sum(0)
    return Reduced(
      total * (step / workers),
      (codes, step),
      jaxmotion.Shared(state.value + greatest),
    )

  def decode(self, payload, like):
    codes, step = payload
    return (codes.astype(jnp.float32) - 128) * step


@dataclasses.dataclass(frozen=True)
class leaky(shared_scale):
  """Makes a mean, or a shared state, of what one worker has alone."""

  part: str = "mean"

  def reduce_in_rounds(self, x, state, key, workers):
    done = yield from super().reduce_in_rounds(x, state, key, workers)
    if self.part == "mean":
      return done._replace(mean=x)
    return done._replace(state=jaxmotion.Shared(x.sum()))


CODECS = {
  "low_rank": codecs.feedback(codecs.low_rank(rank=2)),
  "rotated": codecs.feedback(
    codecs.chain(codecs.rotate(block=32), codecs.low_rank(rank=1))
  ),
  "shared_scale": codecs.feedback(shared_scale()),
}


def test_rounds_share_collectives_and_wait_for_those_that_come_later():
  assert schedule_rounds(()) == ()
  kinds = ("sum",), ("gather",), ("all_to_all", "gather")
  assert schedule_rounds(kinds) == (
    Round("all_to_all", (2,)),
    Round("gather", (1, 2)),
    Round("sum", (0,)),
  )
  # One that needs fewer sums takes part in the last.
  found = schedule_rounds((("sum", "sum"), ("sum",)))
  assert found == (Round("sum", (0,)), Round("sum", (0, 1)))
  # What comes after need not be waited for.
  found = schedule_rounds((("sum", "gather"), ("sum",), ("gather",)))
  assert found == (Round("sum", (0, 1)), Round("gather", (0, 2)))
  crossed = schedule_rounds((("gather", "sum"), ("sum", "gather")))
  assert [kind for kind, _ in crossed] == ["gather", "sum", "gather"]


def test_a_message_of_another_kind_than_stated_is_refused():
  def send_max():
    yield Message("max", jnp.ones(2))

  with pytest.raises(ValueError, match=r"`kinds` .* 'sum' .* 'max'"):
    run(lambda _: run_rounds([send_max()], [("sum",)], "data"), np.ones(1), 1)


@pytest.mark.parametrize("name", CODECS)
def test_codecs_of_several_rounds_keep_their_laws(name):
  xs = RNG.normal(size=(3, 6, 5)).astype(np.float32)
  jaxmotion.testing.check_rounds(CODECS[name], xs)


def reduce_both(codec):
  """Program: an array to its mean and its sum, after one step before."""

  def local(x):
    key = make_key(0, lax.axis_index("data"))
    state = collectives.all_reduce_init(x, "data", codec)
    reduce = functools.partial(
      collectives.all_reduce, x, "data", codec, key=key
    )
    _, state = reduce(state=state)
    return reduce(state=state)[0], reduce(state=state, op="sum")[0]

  return local


def make_tree(workers):
  return {
    "b": RNG.normal(size=(workers, 7)).astype(np.float32),
    "k": RNG.normal(size=(workers, 3, 2, 5)).astype(np.float32),
    "w": RNG.normal(size=(workers, 12, 20)).astype(np.float32),
  }


MIXED = codecs.rules(
  [
    ("b", codecs.identity()),
    ("k", codecs.feedback(shared_scale())),
    ("w", codecs.feedback(codecs.low_rank(rank=3))),
  ]
)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_what_is_sent_is_what_the_rounds_say_on_any_number(workers):
  x = make_tree(workers)

  def local(x):
    x = jax.tree.map(lambda a: a[0], x)
    state = collectives.all_reduce_init(x, "data", MIXED)
    return collectives.all_reduce(x, "data", MIXED, state=state)[0]

  program = bind(local, workers)
  compiled = program.lower(x).compile()
  y = compiled(x)
  mean = x["k"].mean(0)
  np.testing.assert_allclose(y["k"], mean, atol=np.abs(x["k"]).max() / 250)
  np.testing.assert_allclose(y["b"], x["b"].mean(0), atol=1e-6)
  assert np.linalg.matrix_rank(y["w"], tol=1e-4) == 3
  if workers == 1:
    return
  # Between two workers the bias joins the gather of the codes.
  gathered = 30 + (28 if workers == 2 else 0)
  summed = 4 * 3 * (12 + 20) + (0 if workers == 2 else 28)
  sent = (workers - 1) * gathered
  sent += 2 * (workers - 1) / workers * (summed + 4)
  traced = wire.step_bytes(program, x)
  assert traced.total_bytes == sent
  # A gather of two is made of a sum, whose bytes are those of the gather.
  assert wire.compiled_bytes(compiled).total_bytes == sent


@pytest.mark.parametrize("name", ["low_rank", "shared_scale"])
def test_workers_hold_the_same_bits_and_sums_are_means_times_workers(name):
  mean, total = run(reduce_both(CODECS[name]), make_tree(4)["w"], 4)
  assert len(copies(mean)) == len(copies(total)) == 1
  np.testing.assert_allclose(total, 4 * np.asarray(mean), rtol=1e-6)


@pytest.mark.parametrize("part", ["mean", "state"])
def test_what_one_worker_has_alone_may_not_enter_what_all_share(part):
  name = "`codec`" if part == "mean" else "`state`"
  with pytest.raises(ValueError, match=name):
    run(reduce_both(leaky(part=part)), make_tree(2)["b"], 2)


def test_chains_and_other_collectives_refuse_what_they_cannot_run():
  low_rank = codecs.low_rank(rank=1)
  with pytest.raises(ValueError, match="last"):
    codecs.chain(low_rank, codecs.identity())
  with pytest.raises(ValueError, match="linear"):
    codecs.chain(codecs.topk(density=0.5), low_rank)
  for fn in (collectives.all_gather, collectives.reduce_scatter):
    call = functools.partial(fn, axis_name="data", codec=low_rank)
    with pytest.raises(ValueError, match="`codec` .* without other workers"):
      run(call, np.ones((2, 2, 2)), 2)


CODEC = codecs.where_smaller(codecs.feedback(codecs.low_rank(rank=2)))
AXES = jaxmotion.HostAxes("host", "device")
SPECS = {"w": P(None, "model"), "k": P("model", None), "empty": P()}
# The mesh, the workers' axes, and how many workers or devices keep factors of
# their own.
LAYOUTS = {
  "workers": ((4,), ("data",), "data", 1, {}),
  "hosts": ((2, 2), AXES.names, AXES, 2, dict(axis_name=AXES)),
  "model": ((2, 2), ("data", "model"), "data", 2, dict(specs=SPECS)),
}


def loss_fn(params, batch):
  y = jnp.tanh(batch @ params["w"]) @ params["k"]
  return jnp.mean((y - 1) ** 2) + params["empty"].sum()


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_keeps_shared_state_once_for_all_that_share_it(name):
  shape, names, axes, rows, options = LAYOUTS[name]
  exchange = jaxmotion.exchange(axes, CODEC, start=rows - 1, nonfinite="skip")
  tx = optax.chain(exchange, optax.sgd(0.1))
  mesh = mesh_of(*shape, names=names)
  init, step = jaxmotion.make_train_step(loss_fn, tx, mesh, **options)
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  batch, empty = normal(16, 8), np.zeros((0, 3), np.float32)
  state = init({"w": normal(8, 16), "k": normal(16, 4), "empty": empty})
  losses = []
  for _ in range(3):
    state, loss = step(state, batch)
    losses.append(float(loss))
  assert losses[-1] < losses[0]
  is_shared = lambda node: isinstance(node, jaxmotion.Shared)
  nodes = jax.tree.leaves(state.opt_state, is_leaf=is_shared)
  factors = jax.tree.leaves([node for node in nodes if is_shared(node)])
  assert [a.shape[0] for a in factors] == [rows, rows]
  if name != "model":
    # A device has the factors of its shard, and of all of a small leaf.
    assert sorted(len(copies(a)) for a in factors) == [1, rows]
  if name == "workers":
    assert [a.shape[1:] for a in factors] == [(4, 2), (16, 2)]
    assert all(a.sharding.is_fully_replicated for a in factors)


@pytest.mark.parametrize(
  "codec",
  [
    codecs.uniform(bits=4, rounding="stochastic"),
    codecs.feedback(codecs.uniform(bits=4)),
  ],
  ids=["stochastic", "feedback"],
)
def test_equal_small_arrays_are_scattered_and_gathered_as_one(
  codec, monkeypatch
):
  shapes = [(4, 6, 16), (4, 6, 16), (4, 40), (4, 6, 16), (4, 40)] * 3
  rows = [RNG.normal(size=(4, *shape)).astype(np.float32) for shape in shapes]

  def local(rows):
    rows = [x[0] for x in rows]
    key = make_key(0, lax.axis_index("data"))
    leaves = [LeafCodec(codec, key.fold(i)) for i in range(len(rows))]
    states = [jax.vmap(codec.init)(x) for x in rows]
    states = to_varying(states, "data")
    means, states = scatter_means(rows, leaves, states, "data")
    stateless = [LeafCodec(codecs.uniform(bits=8), None)] * len(rows)
    gathered = gather_shards(means, stateless, "data")
    return gathered, jax.tree.map(lambda a: a[None], (means, states))

  program = jax.jit(
    jax.shard_map(
      local, mesh=mesh_of(4), in_specs=P("data"), out_specs=(P(), P("data"))
    )
  )
  found, lines = [], []
  for most in (0, 1000):
    monkeypatch.setattr(_rounds, "_MAX_ALIKE", most)
    program.clear_cache()
    lines.append(program.lower(rows).as_text().count("\n"))
    found.append(jax.device_get(program(rows)))
  jax.tree.map(np.testing.assert_array_equal, *found)
  assert lines[1] < lines[0]
