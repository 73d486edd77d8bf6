"""Fields that the configurations of `experiments.train` share."""

from ml_collections import ConfigDict


def base_config(experiment: str, data: str) -> ConfigDict:
  """Returns a configuration without the fields of a model."""
  # Every field can be set on the command line.
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
  """Returns a configuration of a CNN for images."""
  config = base_config(experiment, data)
  config.model = "cnn"
  config.channels = channels
  config.hidden = 128  # Width of the layer before the classifier.
  return config


def text_config(experiment: str) -> ConfigDict:
  """Returns a configuration of a byte transformer for Python source."""
  # *.py in the order of their paths, without tests and site-packages, or those
  # of another folder, `data_dir`.
  config = base_config(experiment, "stdlib")
  config.train_bytes = 4_000_000  # Upper bounds; about a tenth of the files,
  config.test_bytes = 100_000  # chosen by the hash of their path, is held out.

  # Model: 0.4 million parameters.
  config.model = "transformer"
  config.layers = 2  # Number of blocks.
  config.width = 128  # Width of the residual stream.
  config.heads = 4  # Number of attention heads.
  config.context = 64  # Bytes the model sees.
  return config
