import jax
import jax.numpy as jnp
import optax
import pytest

from experiments.common.console import JobError
from experiments.train import cases, trainer
from experiments.train.presets import PRESETS, Settings
from jaxmotion import codecs, make_train_step, wire
from jaxmotion.transforms.extend import find_exchanges, trace_state

GRADIENTS = {
  "conv": {"kernel": jnp.ones((30, 100)), "bias": jnp.ones(100)},
  "norm": {"scale": jnp.ones(10)},
}


@pytest.mark.parametrize(
  "name", ["int8", "int4_feedback", "topk1_feedback", "sign_feedback"]
)
def test_small_leaves_travel_as_they_are(name):
  codec = cases.get_exchange(name)
  alone = {"kernel": GRADIENTS["conv"]["kernel"]}
  kernel_codec = codec.rules[-1][1]
  kernel_bytes = wire.payload_bytes(kernel_codec, alone)
  small_bytes = 4 * (100 + 10)
  assert wire.payload_bytes(codec, GRADIENTS) == kernel_bytes + small_bytes


def test_baseline_changes_nothing():
  assert cases.get_exchange("fp32") == codecs.identity()


@pytest.mark.parametrize("name", [*PRESETS, "int8", "sharded_int8"])
def test_every_exchange_has_an_optimizer_behind_it(name):
  mesh = jax.make_mesh(
    (1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  settings = Settings(steps=20, weight_decay=0.01)
  cases.check_exchange(name)
  tx = cases.exchange_with(mesh, name, optax.sgd(0.1), settings)
  params = jax.tree.map(jnp.zeros_like, GRADIENTS)
  shapes = trace_state(tx, params, mesh, "data")
  assert find_exchanges(shapes)


def test_unknown_exchange_is_named():
  with pytest.raises(JobError, match=r"one of fp32, .*got 'int7'"):
    cases.get_exchange("int7")


def test_bytes_of_an_exchange_in_turns_are_the_mean_of_its_turns():
  name = "power_sgd_alternating"
  mesh = jax.make_mesh(
    (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  tx = cases.exchange_with(mesh, name, optax.sgd(0.1), Settings(steps=20))
  init, step = make_train_step(lambda p, x: jnp.mean(x @ p), tx, mesh)
  given = (init(jnp.ones((512, 64))), jnp.ones((2, 512)))
  both = trainer.compile_step(
    step, *given, branches=cases.settled_branches(name)
  )
  assert both.wire_bytes == both.compiled_bytes
  # A turn sends a factor of rank 4: 512 or 64 rows. The loss takes 4 bytes.
  one = trainer.compile_step(step, *given, branches=(0,))
  other = trainer.compile_step(step, *given, branches=(1,))
  assert {one.wire_bytes, other.wire_bytes} == {4 * 4 * 512 + 4, 4 * 4 * 64 + 4}
  assert 2 * both.wire_bytes == one.wire_bytes + other.wire_bytes
