"""Fields that make a configuration of `experiments.train` that of a study."""

from ml_collections import ConfigDict

from experiments.study import cases


def study_config(config: ConfigDict, **base_rates: float) -> ConfigDict:
  """Returns a configuration of a study of the same data and model."""
  config.algorithms = tuple(cases.ALGORITHMS)
  config.lengths = (48, 200, 800)  # Steps of the runs that are compared.

  # Trials of the learning rates, with one seed. First the base rate and those
  # `coarse` times less and more. Then, of the best of them: other outer
  # learning rates for local updates, and the rates between for all others. At
  # last those beyond the best, if it is the least or the greatest of all.
  config.trial_steps = 200
  config.trial_seed = 9
  config.coarse = 3.0
  config.fine = 3.0**0.5
  config.further = 2
  config.base_rates = ConfigDict(base_rates)
  # Decay of the weights, in units of the learning rate.
  config.decays = ConfigDict(dict.fromkeys(base_rates, 0.01))
  return config
