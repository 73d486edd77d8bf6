import jax
import numpy as np
import pytest

from experiments.train.decoder import Decoder, Shape

torch = pytest.importorskip("torch")

from experiments.race import torch_worker  # noqa: E402


@pytest.mark.parametrize("layers", [1, 2])
def test_first_loss_and_gradient_are_those_of_jax(layers):
  shape = Shape(layers, channels=32, heads=4, length=16, batch=3)
  decoder = Decoder(shape)
  params = decoder.make_params(0)
  batch = decoder.make_batch(0, 0, 0, 1)
  loss, grads = jax.value_and_grad(decoder.network.loss)(params, batch)

  module = torch_worker.Decoder(params, shape)
  theirs = torch_worker.score_batch(module, batch)
  theirs.backward()
  assert theirs.item() == pytest.approx(float(loss), rel=1e-4)
  named = torch_worker.name_arrays(grads)
  assert set(named) == set(module.weights)
  for name, ours in named.items():
    gap = np.linalg.norm(module.weights[name].grad.numpy() - ours)
    assert gap <= 1e-4 * np.linalg.norm(ours), name
