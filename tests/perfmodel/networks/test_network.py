"""Networks as lists of layers."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion.perfmodel import IMAGES, LABELS, Layer, Network


def dense(params, x):
  return x @ params["kernel"]


def add(params, x, y):
  return x + y


def loss(params, y, labels):
  return jnp.mean((y[:, 0] - labels) ** 2)


KERNEL = {"kernel": jax.ShapeDtypeStruct((3, 3), "float32")}
NET = Network(
  "skip",
  (
    Layer("dense", dense, KERNEL, (IMAGES,), mixes=True),
    Layer("add", add, {}, (0, IMAGES)),
    Layer("loss", loss, {}, (1, LABELS), mixes=True),
  ),
  (3,),
)


def test_a_layer_reads_other_layers_and_the_batch():
  rng = np.random.default_rng(0)
  kernel = rng.standard_normal((3, 3), "float32")
  images = rng.standard_normal((4, 3), "float32")
  labels = np.arange(4)
  expected = np.mean(((images @ kernel + images)[:, 0] - labels) ** 2)
  got = NET.loss({"dense": {"kernel": kernel}}, images, labels)
  np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_only_layers_with_parameters_count():
  assert NET.size == 9
  assert list(NET.params) == ["dense"]


def test_every_output_has_a_shape():
  shapes = [x.shape for x in NET.shapes(5)]
  assert shapes == [(5, 3), (5, 3), ()]
