"""Published algorithms on the transformer of the race, at equal cost.

  python -m experiments.study --config=configs/study_decoder.py

It has not been timed.
"""

from ml_collections import ConfigDict

from experiments.study.cases import study_config
from experiments.train.base_config import text_config


def get_config() -> ConfigDict:
  """Returns the configuration of the study."""
  config = text_config("decoder")
  config.train_bytes = 1 << 30  # All sources.
  config.test_bytes = 32_000
  # 9.7 million parameters. A step reads as many bytes as one of the race, in
  # windows of half the length: each of up to eight workers has a window.
  config.layers = 3
  config.width = 512
  config.heads = 8
  config.context = 64
  config.batch_size = 8
  config.optimizer = "adamw"
  config = study_config(config, adamw=1e-3, sign=3e-4, muon=0.02)
  config.lengths = (48, 192)
  config.trial_steps = 48
  config.further = 0
  # Others need more steps, or an optimizer that costs more than the model.
  config.algorithms = (
    "fp32",
    "int4_feedback",
    "streaming_diloco",
    "sparse_loco",
    "power_sgd",
    "sign_feedback",
    "topk1_feedback",
    "onebit_adam",
  )
  return config
