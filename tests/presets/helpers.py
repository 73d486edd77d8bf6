"""Gradients that are known, for presets on (emulated) hosts of two devices."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion import HostAxes, perfmodel
from jaxmotion.perfmodel.extend import make_layout
from tests.meshes import mesh_of

AXES = HostAxes("host", "device")
MESH = mesh_of(2, 2, names=AXES.names)
PARAMS = {
  "matrix": np.zeros((64, 256), np.float32),
  "vector": np.zeros(4096, np.float32),
  "small": np.zeros(7, np.float32),
}


def loss_fn(params, batch):
  """A loss whose gradient is the mean of the batch."""
  terms = [
    jnp.sum(a[0] * p)
    for a, p in zip(
      jax.tree.leaves(batch), jax.tree.leaves(params), strict=True
    )
  ]
  return sum(terms)


def gradients(of_worker):
  """Each worker's own gradient: leaves with an axis of four workers."""
  return {
    name: np.stack([of_worker(r, p.shape) for r in range(4)])
    for name, p in PARAMS.items()
  }


def normal_gradients():
  generator = np.random.default_rng(0)
  return gradients(
    lambda r, shape: np.float32(1 + r + generator.normal(size=shape))
  )


def constant_gradients():
  return gradients(lambda r, shape: np.full(shape, 1.0 + r, np.float32))


def check_mean(updates, batch, error):
  """Holds what was sent against the mean, leaf by leaf.

  A wrong factor shows in the slope of one on the other, in which the rounding
  of many elements averages out.
  """
  for name, own in batch.items():
    exact, found = own.mean(0).ravel(), -np.asarray(updates[name]).ravel()
    slope = found @ exact / (exact @ exact)
    assert abs(slope - 1) < 0.005 + 0.3 / np.sqrt(exact.size), name
    lost = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert lost < error, name


def poison(grads, kind):
  """Gradients of all workers, of which something is bad."""
  matrix = grads["matrix"].copy()
  match kind:
    case "NaN" | "infinite":
      matrix[1, 2, 3] = np.nan if kind == "NaN" else -np.inf
    case "zero layer":
      matrix[:] = 0
    case "rank 1":
      matrix[:] = np.outer(matrix[0, :, 0], matrix[0, 0])
    case "huge":
      matrix *= np.float32(1e25)
    case "constant row":
      matrix[:, 3] = 0
  return grads | {"matrix": matrix}


BAD = ("NaN", "infinite", "zero layer", "rank 1", "huge", "constant row")


def random_gradients(seed, workers, params):
  """Gradients of all workers."""
  rng = np.random.default_rng(seed)
  return {
    k: rng.normal(size=(workers, *a.shape)).astype(np.float32)
    for k, a in params.items()
  }


def mean_bytes(workers, nbytes=4):
  """What one worker sends to average so many bytes at full precision."""
  return 2 * (workers - 1) / workers * nbytes


def layout_bytes(tree, codec, workers, method=None, devices=None):
  """What an exchange of a tree sends by what its codec asks for."""
  link = perfmodel.Link(latency_s=1e-3, rate=perfmodel.gbit_per_s(1))
  axis, local = (
    n and perfmodel.Axis(name=name, workers=n, link=link)
    for name, n in (("host", workers), ("device", devices))
  )
  return make_layout(tree, axis, codec, method, local).ledger.total_bytes
