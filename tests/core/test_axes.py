"""Names of mesh axes, and of hosts with their devices."""

import pickle

import jax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec as P

from jaxmotion import HostAxes, collectives, core

AXES = HostAxes("host", "device")


@pytest.mark.parametrize("value", [AXES, None, 1, ("a", None), [], (), "aa"])
def test_axes_are_strings_each_named_once(value):
  value = ("a", "a") if value == "aa" else value
  error = ValueError if value in ((), ("a", "a")) else TypeError

  def refuse(name, check):
    with pytest.raises(error, match=f"`{name}` must be the name of a mesh"):
      check(value)

  core.mesh_axes("axis_name", "data")
  core.mesh_axes("axis_name", ("host", "device"))
  refuse("axis_name", lambda v: core.mesh_axes("axis_name", v))
  refuse("hosts", lambda v: HostAxes(v, "device"))
  refuse("devices", lambda v: HostAxes("host", v))
  assert core.worker_axes("axis_name", "data") == "data"
  if value is not AXES:
    refuse("axis_name", lambda v: core.worker_axes("axis_name", v))


@pytest.mark.parametrize("devices", ["host", ("device", "host"), ("host",)])
def test_hosts_and_devices_share_no_axis(devices):
  message = "`devices` must name axes other than `hosts` = 'host', got"
  with pytest.raises(ValueError, match=message):
    HostAxes("host", devices)


def test_names_are_those_of_hosts_then_devices_and_decide_equality():
  axes = HostAxes(("pod", "host"), "device")
  assert axes.names == core.axis_names(axes) == ("pod", "host", "device")
  assert core.worker_axes("axis_name", axes) == axes.names
  assert core.split_axes(axes) == (("pod", "host"), "device")
  assert core.split_axes("data") == ("data", ())
  assert AXES == HostAxes(("host",), ("device",)) != HostAxes("device", "host")
  assert hash(AXES) == hash(HostAxes(("host",), "device"))
  assert AXES != ("host", "device") and AXES != AXES.names
  assert pickle.loads(pickle.dumps(AXES)) == AXES == eval(repr(AXES))


def test_functions_of_axes_know_those_of_hosts_and_devices():
  def read(x):
    assert core.axis_is_bound(AXES) and core.axis_size(AXES) == 6
    assert core.tracks_varying(AXES.names)
    assert core.varying_axes(core.to_varying(x, AXES)) == set(AXES.names)
    return lax.psum(core.to_varying(x, AXES), AXES.names)

  mesh = AbstractMesh((2, 3), AXES.names)
  mapped = jax.shard_map(read, mesh=mesh, in_specs=P(), out_specs=P())
  assert jax.eval_shape(mapped, jax.ShapeDtypeStruct((3,), "float32")).ndim == 1


def test_a_collective_without_hosts_refuses_them():
  with pytest.raises(TypeError, match="`axis_name` must be the name of a mesh"):
    collectives.all_gather(jax.numpy.ones(3), AXES)
