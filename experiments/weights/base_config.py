"""Fields that the configurations of host-resident training share."""

from ml_collections import ConfigDict


def base_config(experiment: str, model: str) -> ConfigDict:
  """Returns a configuration; every field can be set on the command line."""
  config = ConfigDict()
  config.experiment = experiment

  # Data: 1198 digits to learn from, 599 held out.
  config.data = "digits"  # photographs, cifar10 or imagefolder.
  config.data_dir = ""  # Folder of cifar10 and imagefolder.
  config.image_size = 32  # Images are resized to this; a multiple of 32.

  config.model = model
  config.width = 0.125  # Factor of all channels of the paper's network.

  config.cases = (
    *("fp32", "truncate1", "truncate2", "truncate3", "awp", "awp_tuned"),
    *("int8", "int8_delta", "int4_delta", "budget_delta"),
  )
  config.seeds = (0, 1, 2)  # Seeds of the initial parameters and the batches.
  # The paper's 4000 batches are ten of these runs: a twentieth of one.
  config.awp_interval = 20
  config.awp_threshold = 0.0  # awp_tuned: any decrease of a norm counts.
  config.error_budget = 2e-3  # budget_delta: relative error of a group.
  config.budget_every = 10  # Steps between two measurements of the error.
  config.budget_patience = 2  # Measurements before the level decreases.

  # Optimization.
  config.steps = 400  # Steps of each run.
  config.batch_size = 64
  config.optimizer = "momentum"
  config.learning_rate = 0.005  # Peak; a cosine takes it to zero.
  config.warmup_steps = 40  # Steps from zero to the peak.
  config.momentum = 0.9
  config.weight_decay = 5e-4

  config.eval_every = 10  # Steps.
  config.error_threshold = 10.0  # Per cent, for the time to an error.

  # The network whose step is profiled.
  config.profile_width = 0.5
  config.profile_size = 64
  config.profile_batch = 64
  config.profile_rounds = 5

  config.checkpoint_every = 100  # Steps; only with --workdir.
  return config
