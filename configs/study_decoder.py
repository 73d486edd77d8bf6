"""Published algorithms on the transformer of the race, at equal cost.

  python -m experiments.study --config=configs/study_decoder.py

It takes an hour on 2 cores, with nothing beside. docs/benchmarks/study.md has
its results.
"""

from ml_collections import ConfigDict

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
  # `dgc` and `ef21_sgdm` need more steps; `demo` and `muloco` compute more than
  # the model does.
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
  config.lengths = (48, 192)  # Steps of the runs that are compared.

  # Trials of the learning rates, with one seed. First the base rate and those
  # `coarse` times less and more. Then, of the best of them: other outer
  # learning rates for local updates, and the rates between for all others. At
  # last up to `further` beyond the best, if it is the least or the greatest.
  config.trial_steps = 48
  config.trial_seed = 9
  config.coarse = 3.0
  config.fine = 3.0**0.5
  config.further = 0
  # Learning rates of optimizers that algorithms take, and decays of the
  # weights, in units of the rate.
  config.base_rates = ConfigDict()
  config.base_rates.update(adamw=1e-3, sign=3e-4, muon=0.02, sgd=0.1)
  config.decays = ConfigDict(dict.fromkeys(config.base_rates, 0.01))
  return config
