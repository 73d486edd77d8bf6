"""Fields that the configurations of `experiments.train` share."""

from ml_collections import ConfigDict


def base_config(experiment: str, data: str) -> ConfigDict:
  """Returns a configuration without the fields of a model.

  Every field can be set on the command line.

  Args:
    experiment: name in the rows.
    data: name of the data: digits, photographs, cifar10, imagefolder or stdlib.
  """
  config = ConfigDict()
  config.experiment = experiment
  config.data = data
  config.data_dir = ""  # Folder of data that does not come with a package.

  # Exchanges, compared on the same seeds and batches.
  config.exchanges = (
    "fp32",
    "bf16",
    "int8",
    "int4_feedback",
    "topk1_feedback",
    "sign_feedback",
  )
  config.seeds = (0, 1, 2)  # Seeds of the initial parameters and the batches.
  config.workers = 4  # Devices; emulated on the CPU where there are fewer.

  # Optimization.
  config.steps = 800  # Steps of each run.
  config.batch_size = 128  # Examples over all workers.
  config.optimizer = "sgd"  # sgd (Nesterov) or adamw.
  config.learning_rate = 0.05  # Peak; a cosine takes it to zero.
  config.warmup_steps = 50  # Steps from zero to the peak.
  config.momentum = 0.9  # b1 of adamw.
  config.weight_decay = 5e-4

  config.checkpoint_every = 100  # Steps; only with --workdir.
  return config


def cnn_config(
  experiment: str, data: str, channels: tuple[int, ...]
) -> ConfigDict:
  """Returns a configuration of a CNN for images.

  Args:
    experiment: name in the rows.
    data: name of the data: digits, photographs, cifar10 or imagefolder.
    channels: output channels of each convolution.
  """
  config = base_config(experiment, data)
  config.model = "cnn"
  config.channels = channels
  config.hidden = 128  # Width of the layer before the classifier.
  return config
