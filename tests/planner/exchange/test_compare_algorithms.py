"""Other algorithms beside a plan, and why some are not offered."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from jaxmotion import perfmodel, planner, presets, wire
from jaxmotion.perfmodel import builtin_platform

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
  return plan, planner.compare_algorithms(plan)


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


def test_vectors_have_no_factors():
  plan = planner.advise(vector_loss, VECTORS, (), ETHERNET)
  found = find(planner.compare_algorithms(plan), "power_sgd")
  assert not found.is_offered and "no fewer bytes" in found.note


def test_what_does_not_fit_is_not_offered():
  device = dataclasses.replace(ETHERNET.device, memory_bytes=4e6)
  small = dataclasses.replace(ETHERNET, device=device)
  plan, table = compare(small)
  assert not plan.rarer.is_offered and "of memory" in plan.rarer.note
  assert "not offered" in str(table)
  assert not find(table, "local_updates").is_offered


def test_hosts_with_several_devices_reduce_within_first():
  platform = builtin_platform("h100_cluster")
  plan = planner.advise(
    matrix_loss, MATRIX, (X,), platform, mesh_axis="host", local_axis="device"
  )
  table = planner.compare_algorithms(plan)
  assert find(table, "presets.lion").is_offered
