"""Other algorithms beside a plan, and why some are not offered."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType

import jaxmotion
from jaxmotion import perfmodel, planner, presets, wire
from jaxmotion.perfmodel import builtin_platform
from jaxmotion.planner.exchange import _algorithms

MATRIX = jax.ShapeDtypeStruct((512, 512), "float32")
VECTORS = [jax.ShapeDtypeStruct((300,), "float32")] * 4
X = jax.ShapeDtypeStruct((32, 512), "float32")
ETHERNET = builtin_platform("ethernet_1gbit")


def matrix_loss(w, x):
  return jnp.mean(jnp.tanh(x @ w) ** 2)


def vector_loss(params):
  return sum(jnp.sum(p**2) for p in params)


def compare(platform):
  plan = planner.advise(matrix_loss, MATRIX, (X,), platform)
  return plan, plan.algorithms


@functools.cache
def compare_on_ethernet():
  return compare(ETHERNET)


def find(table, name):
  (found,) = [choice for choice in table if name in choice.name]
  return found


def test_the_fastest_is_first_and_what_is_refused_last():
  _, table = compare_on_ethernet()
  seconds = [choice.step_s for choice in table if choice.is_offered]
  assert seconds == sorted(seconds) and len(seconds) > 5
  offered = [choice.is_offered for choice in table]
  assert offered == sorted(offered, reverse=True)


def test_every_preset_is_weighed():
  _, table = compare_on_ethernet()
  names = [
    n for n, f in vars(presets).items() if inspect.isfunction(f) and n[0] != "_"
  ]
  assert names and all(find(table, f"presets.{name}(") for name in names)


def test_a_rare_exchange_costs_its_share_and_is_named_where_it_pays():
  plan, table = compare_on_ethernet()
  local = find(table, "local_updates")
  every = int(local.name.rpartition("=")[2].rstrip(")"))
  assert local.wire_bytes == plan.step.wire_bytes / every
  assert "A rarer exchange beats a smaller one: local_updates" in str(plan)
  # What is fast already gains nothing from being rare.
  fast = dataclasses.replace(
    ETHERNET.axes[0].link,
    latency_s=0.0,
    rate=perfmodel.gbyte_per_s(1000),
  )
  near = dataclasses.replace(
    ETHERNET,
    axes=(dataclasses.replace(ETHERNET.axes[0], link=fast),),
    sources={},
  )
  x = jax.ShapeDtypeStruct((1 << 15, 512), "float32")
  plan = planner.advise(matrix_loss, MATRIX, (x,), near)
  assert "rarer" not in str(plan)


def test_a_preset_sends_what_its_program_asks_for():
  """Predicted bytes of the last phase are those of the traced update."""
  _, table = compare_on_ethernet()
  mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
  tx = presets.power_sgd("data", start=0)

  def update(grads):
    state = tx.init(grads)
    return tx.update(grads, state)[0]

  traced = wire.step_bytes(
    jax.shard_map(
      update,
      mesh=mesh,
      in_specs=jax.P("data"),
      out_specs=jax.P("data"),
      check_vma=False,
    ),
    jax.ShapeDtypeStruct((8 * 512, 512), "float32"),
  )
  found = find(table, "power_sgd")
  assert found.wire_bytes == pytest.approx(traced.total_bytes, rel=1e-6)


def test_vectors_have_no_factors_and_no_directions():
  plan = planner.advise(vector_loss, VECTORS, (), ETHERNET)
  assert "no fewer bytes" in refusal(plan, "power_sgd")
  assert "`params` has none" in refusal(plan, "muloco")


def refusal(plan, name):
  """Says why a plan does not offer an algorithm."""
  found = find(plan.algorithms, name)
  assert not found.is_offered and found.wire_bytes is None
  return found.note


def model_loss(params, ids):
  def layer(x, w):
    return jnp.tanh(x @ w), None

  x, _ = jax.lax.scan(layer, params["table"][ids], params["layers"])
  return jnp.mean(x @ params["table"].T if "tied" in params else x)


def plan_model(optimizer, **more):
  params = {
    "table": jax.ShapeDtypeStruct((1000, 64), "float32"),
    "layers": jax.ShapeDtypeStruct((3, 64, 64), "float32"),
    **more,
  }
  ids = jax.ShapeDtypeStruct((8,), "int32")
  return planner.advise(
    model_loss, params, (ids,), ETHERNET, optimizer=optimizer
  )


def test_what_the_loss_or_the_optimizer_breaks_is_not_offered():
  norm = optax.clip_by_global_norm(1.0)
  plan = plan_model(optax.chain(norm, optax.adam(0.1)))
  for name in ("dgc", "ef21_sgdm"):
    assert "`optimizer` keeps moments" in refusal(plan, name)
  for name in ("onebit_adam", "muloco"):
    assert "looks up rows of `table`" in refusal(plan, name)
  assert "`layers` apart, a stack" in refusal(plan, "power_sgd")
  for name in ("sharded", "sdp4bit"):
    assert "optimizer of single elements" in refusal(plan, name)
  assert "gather_block" in refusal(plan, "zeropp")
  assert find(plan.algorithms, "lion").is_offered
  # A table that is also read as a whole has a gradient everywhere.
  plan = plan_model(optax.sgd(0.1), tied=jax.ShapeDtypeStruct((1,), "float32"))
  for name in ("dgc", "ef21_sgdm", "onebit_adam", "muloco", "sdp4bit"):
    assert find(plan.algorithms, name).is_offered


def test_sharded_bytes_of_all_leaves_are_those_of_a_traced_update():
  """Those of one leaf of each shape are multiplied, which saves the trace."""
  params = [MATRIX, *VECTORS, MATRIX]
  loss = lambda params, x: matrix_loss(params[0] + params[-1], x)
  plan = planner.advise(loss, params, (X,), ETHERNET)
  found = find(plan.algorithms, "sdp4bit")
  tx = presets.sdp4bit("data", optax.sgd(0.1))
  pricing = _algorithms._Pricing(plan.problem, plan.uncompressed)
  _, ledger = pricing._trace_moves(tx, params)
  assert found.wire_bytes == pytest.approx(ledger.total_bytes)


def test_what_does_not_fit_is_not_offered():
  device = dataclasses.replace(ETHERNET.device, memory_bytes=4e6)
  small = dataclasses.replace(ETHERNET, device=device)
  plan, table = compare(small)
  assert "of memory" in refusal(plan, "local_updates")
  assert "not offered" in str(table) and "rarer" not in str(plan)


def test_hosts_with_several_devices_reduce_within_first():
  platform = builtin_platform("h100_cluster")
  axes = jaxmotion.HostAxes("host", "device")
  plan = planner.advise(matrix_loss, MATRIX, (X,), platform, mesh_axis=axes)
  for name in ("lion", "sdp4bit", "diloco", "streaming_diloco", "muloco"):
    assert find(plan.algorithms, f"presets.{name}").is_offered
