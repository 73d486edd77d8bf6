import jax.numpy as jnp
import pytest

from experiments.train import cases
from jaxmotion import codecs, wire

GRADIENTS = {
  "conv": {"kernel": jnp.ones((30, 100)), "bias": jnp.ones(100)},
  "norm": {"scale": jnp.ones(10)},
}


@pytest.mark.parametrize(
  "name", ["int8", "int4_feedback", "topk1_feedback", "sign_feedback"]
)
def test_small_leaves_travel_as_they_are(name):
  codec = cases.get_exchange(name)
  alone = {"kernel": GRADIENTS["conv"]["kernel"]}
  kernel_codec = codec.rules[-1][1]
  kernel_bytes = wire.payload_bytes(kernel_codec, alone)
  small_bytes = 4 * (100 + 10)
  assert wire.payload_bytes(codec, GRADIENTS) == kernel_bytes + small_bytes


def test_baseline_changes_nothing():
  assert cases.get_exchange("fp32") == codecs.identity()


def test_unknown_exchange_is_named():
  with pytest.raises(ValueError, match=r"some of fp32, .*got 'int7'"):
    cases.get_exchange("int7")
