"""ResNet-34 whose weights live on the host, with many codecs.

  python -m experiments.weights --config=configs/weights_resnet.py

A level for each block; seven cases. Three seeds take half an hour on two cores
and more, --config.seeds="(0,)" a third of that. The network has 0.3 million
parameters; 21.4 million at width 1, 224 pixels, and 201 classes.
"""

from ml_collections import ConfigDict

from experiments.weights.base_config import base_config


def get_config() -> ConfigDict:
  """Returns the configuration of the job."""
  config = base_config("weights_resnet", "resnet34")
  config.cases = (
    "fp32",
    "truncate1",
    "truncate2",
    "awp",
    "awp_tuned",
    "int8",
    "budget_delta",
  )
  # The paper's 2000 batches are ten of these runs: a twentieth of one.
  config.awp_interval = 10

  # Optimization.
  config.steps = 200  # Steps of each run.
  config.batch_size = 32
  config.learning_rate = 0.05  # Peak; a cosine takes it to zero.
  config.warmup_steps = 20  # Steps from zero to the peak.
  return config
