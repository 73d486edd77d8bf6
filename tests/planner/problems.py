"""A small step and codecs to choose from, for tests of the planner."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion import codecs, make_key, perfmodel
from jaxmotion.perfmodel import Link, gbit_per_s
from jaxmotion.planner.exchange._errors import bound_errors
from jaxmotion.planner.exchange._problem import ExchangeProblem

PARAMS = {
  "first": jax.ShapeDtypeStruct((96, 320), "float32"),
  "bias": jax.ShapeDtypeStruct((320,), "float32"),
  "last": jax.ShapeDtypeStruct((320, 64), "float32"),
}
BATCH = jax.ShapeDtypeStruct((8, 96), "float32")
THREE = (codecs.identity(), codecs.cast("bfloat16"), codecs.uniform(bits=8))


def loss(params, x):
  x = jax.nn.relu(x @ params["first"] + params["bias"][None])
  return jnp.mean(jnp.square(x @ params["last"]))


WORK = perfmodel.trace_step(loss, PARAMS, (BATCH,))


def cluster(workers=8, gbit=1.0, latency_s=5e-5):
  """A platform of hosts on Ethernet."""
  platform = perfmodel.builtin_platform("ethernet_1gbit").resize(data=workers)
  (axis,) = platform.axes
  link = Link(latency_s=latency_s, rate=gbit_per_s(gbit))
  axes = (dataclasses.replace(axis, link=link),)
  return dataclasses.replace(platform, axes=axes)


def problem_on(platform, mesh_axis="data", **options):
  """The exchange of the small step, with errors as the codecs bound them."""
  errors = bound_errors(PARAMS, THREE)
  return ExchangeProblem(
    WORK, platform, mesh_axis, THREE, errors, 0.1, **options
  )


def gradients():
  """Gradients of one step, of different sizes."""
  rng = np.random.default_rng(0)
  scales = {"first": 1e-3, "bias": 1e-2, "last": 3e-3}
  return {
    name: (scales[name] * rng.standard_normal(like.shape)).astype("float32")
    for name, like in PARAMS.items()
  }


def every_choice(tensors, codecs):
  """All choices of codecs: int[choices, tensors]."""
  return np.array(list(itertools.product(range(codecs), repeat=tensors)))


def rules_of(choice, candidates=THREE):
  """The codec of an exchange that gives each tensor its own."""
  names = [path for path, _ in jax.tree.leaves_with_path(PARAMS)]
  return codecs.rules(
    tuple(
      (f"^{name[0].key}$", candidates[c])
      for name, c in zip(names, choice, strict=True)
    )
  )


def relative_errors(codec, x):
  """Relative errors of encoding each of the arrays stacked in `x`."""

  @jax.jit
  def round_trip(x):
    payload, _ = codec.encode(x, codec.init(x), make_key(0))
    return codec.decode(payload, x)

  y = np.stack([np.asarray(round_trip(row), np.float64) for row in x])
  lost, whole = (
    np.linalg.norm(a.reshape(len(a), -1), axis=1)
    for a in (y - x, x.astype(np.float64))
  )
  return lost / whole
