"""AlexNet whose weights live on the host, with many codecs.

  python -m experiments.weights --config=configs/weights_alexnet.py

Ten cases with three seeds: about ten minutes on two cores. The network has 0.7
million parameters; 63.8 million at width 1, 224 pixels, and 201 classes.
"""

from ml_collections import ConfigDict

from experiments.weights.base_config import base_config


def get_config() -> ConfigDict:
  """Returns the configuration of the job."""
  return base_config("weights_alexnet", "alexnet")
