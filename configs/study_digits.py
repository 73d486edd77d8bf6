"""Published algorithms on a small CNN on digits, at equal steps, bytes, time.

  python -m experiments.study --config=configs/study_digits.py

Takes about half an hour of processor time on 2 cores. docs/benchmarks/study.md
has its results.
"""

from ml_collections import ConfigDict

from experiments.study.cases import study_config
from experiments.train.base_config import cnn_config


def get_config() -> ConfigDict:
  """Returns the configuration of the study."""
  config = cnn_config("digits", "digits", channels=(32, 64))
  config = study_config(config, sgd=0.05, adamw=2e-3, sign=5e-4, muon=0.02)
  config.decays.sgd = 2e-3
  return config
