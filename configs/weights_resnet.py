"""ResNet-34 whose weights live on the host, under every way to move them.

  python -m experiments.weights --config=configs/weights_resnet.py

A level for each building block; seven cases. Three seeds take half an hour on
two cores and more, --config.seeds="(0,)" a third of that.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  """The configuration; every value can be set on the command line."""
  config = ConfigDict()
  config.experiment = "weights_resnet"  # Name in the rows.

  # Data: 1198 digits to learn from, 599 held out.
  config.data = "digits"  # photographs, cifar10 or imagefolder.
  config.data_dir = ""  # Of cifar10 and imagefolder.
  config.image_size = 32  # Images are resized to this; a multiple of 32.

  # Model: 0.3 million parameters; 21.4 million at width 1, 224 pixels, and 201
  # classes.
  config.model = "resnet34"
  config.width = 0.125  # Of all layers, in those of the paper's network.

  config.cases = (
    "fp32",
    "truncate1",
    "truncate2",
    "awp",
    "awp_tuned",
    "int8",
    "budget_delta",
  )
  config.seeds = (0, 1, 2)  # Of the initial parameters and the batches.
  # The paper's 2000 batches are ten of these runs: a twentieth of one.
  config.awp_interval = 10
  config.awp_threshold = 0.0  # Of awp_tuned: any fall of a norm counts.
  config.error_budget = 2e-3  # Of budget_delta, of a group's weights.
  config.budget_every = 10  # Steps between two looks at the error.
  config.budget_patience = 2  # Looks before it goes down.

  # Optimisation.
  config.steps = 200  # Of each run.
  config.batch_size = 32
  config.optimizer = "momentum"
  config.learning_rate = 0.05  # At the peak; a cosine takes it to zero.
  config.warmup_steps = 20  # From zero to the peak.
  config.momentum = 0.9
  config.weight_decay = 5e-4

  config.eval_every = 10  # Steps.
  config.error_threshold = 10.0  # Per cent, of time to error.

  # The network whose step is taken apart.
  config.profile_width = 0.5
  config.profile_size = 64
  config.profile_batch = 64
  config.profile_rounds = 5

  config.checkpoint_every = 100  # Steps; only with --workdir.
  return config
