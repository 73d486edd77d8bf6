"""Training that goes on with other workers sends all that is to be sent."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

import jaxmotion
from jaxmotion import checkpoint, codecs
from jaxmotion.transforms import gather_params
from tests.checkpoint.helpers import draw_gradients
from tests.meshes import mesh_of

SHAPES = {"p": (25, 26), "w1": (12, 32), "w2": (32, 10), "b": (8,)}
SPECS = {"p": P(), "w1": P(None, "model"), "w2": P("model"), "b": P()}
# Axis that the model's axis cuts in two.
CUT = {"w1": 1, "w2": 0}
SIGNS = codecs.feedback(codecs.sign())
MIXED = codecs.feedback(
  codecs.rules([("p", codecs.uniform(bits=4)), (".", codecs.topk(density=0.2))])
)
HOSTS = jaxmotion.HostAxes("host", "device")


def make_chain(codec, **options):
  return optax.chain(
    jaxmotion.exchange("data", codec, **options), optax.sgd(1.0)
  )


def make_sharded(axes, weight_codec):
  return jaxmotion.sharded(
    axes, optax.sgd(1.0), gradient_codec=SIGNS, weight_codec=weight_codec
  )


# (chain or scheme, axes, lengths before and after, kind of the axes)
CASES = {
  "sum": (make_chain(MIXED, op="sum"), ("data",), [(2,), (3,)], AxisType.Auto),
  "fully_sharded": (
    jaxmotion.fully_sharded(
      optax.sgd(1.0), gradient_codec=codecs.sign(), error_feedback=True
    ),
    ("data",),
    [(4,), (3,)],
    AxisType.Auto,
  ),
  "hosts": (
    make_sharded(HOSTS, codecs.identity()),
    HOSTS.names,
    [(2, 2), (3, 2)],
    AxisType.Auto,
  ),
  "model": (
    make_sharded("data", codecs.uniform(bits=4)),
    ("data", "model"),
    [(2, 2), (3, 2)],
    AxisType.Auto,
  ),
  "explicit_model": (
    make_chain(SIGNS),
    ("data", "model"),
    [(2, 2), (3, 2)],
    AxisType.Explicit,
  ),
}


def linear_loss(params, batch):
  """The gradient of an example is itself."""
  params = gather_params(params)
  return sum(jnp.sum(params[k] * jnp.mean(batch[k], 0)) for k in params)


def read_rest(one, shards, names):
  """What the only worker has still to send, of all shards of the model."""
  values = [
    np.asarray(a, np.float64)
    for path, a in jax.tree.leaves_with_path(one)
    if ".memory.value" in (kind := jax.tree_util.keystr(path))
    or kind.startswith(".error")
  ]
  found = {}
  for name in names:
    shape = SHAPES[name]
    own = list(shape)
    if shards > 1 and name in CUT:
      own[CUT[name]] //= shards
    # Every leaf has a size of its own. What is small may have no memory.
    a = {v.size: v for v in values}.get(shards * np.prod(own), np.zeros(1))
    parts = np.resize(a, (shards, *own))
    is_cut = own != list(shape)
    found[name] = np.concatenate(list(parts), CUT[name]) if is_cut else parts[0]
  return found


@pytest.mark.parametrize("name", CASES)
def test_what_is_sent_and_remembered_adds_up_through_resizes(name):
  scheme, names, meshes, kind = CASES[name]
  axes = HOSTS if name == "hosts" else "data"
  has_model = "model" in names
  leaves = ("w1", "w2", "b") if has_model else ("p", "b")
  start = {k: np.zeros(SHAPES[k], np.float32) for k in leaves}
  specs = {k: SPECS[k] for k in leaves} if has_model else None
  options = dict(axis_name=axes, specs=specs)
  rng, exact = np.random.default_rng(0), dict.fromkeys(leaves, 0.0)
  params, state, layout = start, None, None
  for lengths in meshes:
    mesh = mesh_of(*lengths, names=names, kind=kind)
    with jax.set_mesh(mesh):
      init, step = jaxmotion.make_train_step(
        linear_loss, scheme, mesh, **options
      )
      fresh = init(params)
      if state is not None:
        held = checkpoint.resize(
          init, state.opt_state, params, layout, mesh, **options
        )
        fresh = fresh._replace(opt_state=held)
      layout = checkpoint.describe_state(init, params, mesh, **options)
      batch = draw_gradients(start, 12, rng)
      places = jax.tree.map(lambda a: a.sharding, fresh)
      state, _ = step(fresh, batch)
    for place, a in zip(
      jax.tree.leaves(places), jax.tree.leaves(state), strict=True
    ):
      assert a.sharding.is_equivalent_to(place, a.ndim)
    params = jax.device_get(jaxmotion.read_params(state))
    times = lengths[0] if name == "sum" else 1
    for k in exact:
      exact[k] += times * batch[k].astype(np.float64).mean(0)
  layout = checkpoint.Layout.from_dict(layout.to_dict())
  assert layout == checkpoint.describe_state(init, params, mesh, **options)
  shards = meshes[0][1] if specs else 1
  ones = (1, shards)[: len(names)]
  one = AbstractMesh(ones, names, axis_types=(kind,) * len(names))
  state = state.opt_state
  rest = checkpoint.resize(init, state, params, layout, one, **options)
  rest, held = read_rest(rest, shards, leaves), params
  if hasattr(state, "master"):
    held = jax.tree.map(
      lambda a, p: a[tuple(map(slice, p.shape))], state.master.value, params
    )
  for k in leaves:
    sent = -np.asarray(held[k], np.float64)
    bound = 1e-6 * np.abs(exact[k]).max()
    np.testing.assert_allclose(sent + rest[k], exact[k], rtol=0, atol=bound)
    is_kept = name != "fully_sharded" or k != "b"
    assert (
      not is_kept or np.abs(rest[k]).max() > 1e-3
    )  # It is still to be sent.
  if specs:
    other = mesh_of(2, 1, names=names, kind=kind)
    with pytest.raises(ValueError, match="`specs` must shard the model .*'mod"):
      checkpoint.resize(init, state, params, layout, other, **options)
