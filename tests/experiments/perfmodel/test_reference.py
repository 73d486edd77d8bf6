import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.perfmodel.reference import (
  IMAGES,
  LABELS,
  Layer,
  Network,
  reference_network,
)
from jaxmotion.perfmodel import predict_cost

# Parameters, and 1e9 multiplications of convolutions and matmuls, as
# https://docs.pytorch.org/vision/stable/models.html has them.
PUBLISHED = {
  "alexnet": (61_100_840, 0.714),
  "vgg11": (132_863_336, 7.609),
  "vgg16": (138_357_544, 15.47),
  "resnet18": (11_689_512, 1.814),
  "resnet34": (21_797_672, 3.664),
  "resnet50": (25_557_032, 4.089),
  "googlenet": (6_624_904, 1.498),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_multiplications_are_the_published_ones(name):
  net = reference_network(name)
  params, billions = PUBLISHED[name]
  assert net.size == params
  # The literature multiplies padding too.
  padded = sum(
    y.size * math.prod(layer.params["kernel"].shape[:-1])
    for layer, y in zip(net.layers, net.shapes(1), strict=True)
    if layer.params
  )
  assert padded / 1e9 == pytest.approx(billions, abs=5e-4 + 5e-5 * billions)
  forward = predict_cost(net.loss, net.params, *net.batch(1)).totals
  ours = forward["convolution"].flops + forward["matmul"].flops
  assert 0.9 * 2 * padded < ours < 2 * padded


@pytest.mark.parametrize("name", ["vgg11", "resnet18"])
def test_layers_add_up_to_the_network(name):
  net = reference_network(name)
  images, labels = net.batch(2)
  outputs = net.shapes(2)
  parts = []
  for layer in net.layers:
    inputs = [[*outputs, labels, images][i] for i in layer.inputs]
    parts.append(predict_cost(layer.fn, layer.params, *inputs))
  whole = predict_cost(net.loss, net.params, images, labels)
  assert sum(p.flops for p in parts) == whole.flops
  assert sum(p.unfused_bytes for p in parts) == whole.unfused_bytes
  # A branch's last layer fuses with the sum or join after it.
  together = whole.bytes / sum(p.bytes for p in parts)
  assert 0.9 < together <= 1
  assert name != "vgg11" or together > 0.9999


def test_convolution_and_loss_compute_their_formulas():
  net = reference_network("alexnet")
  layer = net.layers[0]
  params = {k: jnp.ones(a.shape) for k, a in layer.params.items()}
  y = layer.fn(params, jnp.ones((1, 31, 31, 3)))
  assert y.shape == (1, 7, 7, 64)
  assert float(y.max()) == 11 * 11 * 3 + 1
  loss = net.layers[-1].fn({}, jnp.zeros((2, 10)), jnp.array([1, 2]))
  assert float(loss) == pytest.approx(math.log(10))


def test_an_unknown_network_is_refused():
  with pytest.raises(ValueError, match="`name` must be one of 'alexnet'"):
    reference_network("lenet")


KERNEL = {"kernel": jax.ShapeDtypeStruct((3, 3), "float32")}
SKIP = Network(
  "skip",
  (
    Layer("dense", lambda p, x: x @ p["kernel"], KERNEL, (IMAGES,), mixes=True),
    Layer("add", lambda p, x, y: x + y, {}, (0, IMAGES)),
    Layer(
      "loss",
      lambda p, y, labels: jnp.mean((y[:, 0] - labels) ** 2),
      {},
      (1, LABELS),
      mixes=True,
    ),
  ),
  (3,),
)


def test_a_layer_reads_other_layers_and_the_batch():
  assert [x.shape for x in SKIP.shapes(5)] == [(5, 3), (5, 3), ()]
  # Only layers with parameters count.
  assert SKIP.size == 9
  assert list(SKIP.params) == ["dense"]
  rng = np.random.default_rng(0)
  kernel = rng.standard_normal((3, 3), "float32")
  images = rng.standard_normal((4, 3), "float32")
  labels = np.arange(4)
  expected = np.mean(((images @ kernel + images)[:, 0] - labels) ** 2)
  got = SKIP.loss({"dense": {"kernel": kernel}}, images, labels)
  np.testing.assert_allclose(got, expected, rtol=1e-5)
