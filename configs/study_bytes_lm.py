"""Published algorithms on a byte transformer, at equal steps, bytes, time.

  python -m experiments.study --config=configs/study_bytes_lm.py

It has not been timed. It has fewer algorithms, lengths and steps than
`study_digits`, because a step takes ten times as long. docs/benchmarks/study.md
has its results.
"""

from ml_collections import ConfigDict

from experiments.study.cases import study_config
from experiments.train.base_config import text_config


def get_config() -> ConfigDict:
  """Returns the configuration of the study."""
  config = text_config("bytes_lm")
  config.batch_size = 32  # Windows of text over all workers.
  config.optimizer = "adamw"
  config = study_config(config, sgd=0.1, adamw=3e-3, sign=5e-4, muon=0.02)
  config.lengths = (48, 200)
  config.trial_steps = 64
  config.further = 0
  config.algorithms = (
    "fp32",
    "diloco_int4",
    "int4_feedback",
    "streaming_diloco",
    "power_sgd",
    "topk1_feedback",
    "lion",
    "onebit_adam",
    "signum",
    "ef21_sgdm",
    "dgc",
    "sparse_loco",
    "muloco",
    "demo",
  )
  return config
