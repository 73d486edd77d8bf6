"""VGG-A whose weights live on the host, with many codecs.

  python -m experiments.weights --config=configs/weights_vgg.py

Ten cases with three seeds: about ten minutes on two cores, rows in
docs/results/weights_vgg.jsonl. The network has 0.45 million parameters; 129.6
million at width 1, 224 pixels, and 201 classes.
"""

from ml_collections import ConfigDict

from experiments.weights.base_config import base_config


def get_config() -> ConfigDict:
  """Returns the configuration of the job."""
  return base_config("weights_vgg", "vgg_a")
