import jax
import numpy as np
import pytest

from experiments.train.decoder import Decoder, Shape, list_rates

DECODER = Decoder(
  Shape(layers=2, channels=16, heads=2, length=8, batch=5, held_out=7)
)


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_hosts_share_the_windows_of_one(hosts):
  parts = [((1, 2, rank, hosts), (rank, hosts)) for rank in range(hosts)]
  for take, whole, chosen in (
    (DECODER.make_batch, DECODER.make_batch(1, 2, 0, 1), 0),
    (DECODER.held_out, DECODER.held_out(0, 1), 1),
  ):
    own = [take(*part[chosen]) for part in parts]
    for one, shares in zip(whole, zip(*own, strict=True), strict=True):
      joined = np.empty_like(one)
      for rank, share in enumerate(shares):
        joined[rank::hosts] = share
      np.testing.assert_array_equal(joined, one)


def test_labels_are_the_bytes_that_follow():
  tokens, labels = DECODER.make_batch(0, 0, 0, 1)
  np.testing.assert_array_equal(tokens[:, 1:], labels[:, :-1])
  assert tokens.shape == (5, 8)


def test_each_layer_has_matrices_of_its_own():
  params = DECODER.make_params(0)
  assert {"blocks0", "blocks1", "embed", "logits"} == set(params)
  assert max(leaf.ndim for leaf in jax.tree.leaves(params)) == 2
  other = DECODER.make_params(1)
  assert np.any(params["embed"]["tokens"] != other["embed"]["tokens"])


@pytest.mark.parametrize("steps", [1, 8, 100])
def test_rates_rise_to_the_peak_and_fall_to_almost_nothing(steps):
  rates = list_rates(0.5, steps)
  assert len(rates) == steps and rates.max() == 0.5 and rates.min() > 0
  top = int(rates.argmax())
  assert top <= steps / 16 and np.all(np.diff(rates[top:]) < 0)
