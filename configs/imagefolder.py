"""A CNN on a tree of image files, one folder a class.

  python -m experiments.train --config=configs/imagefolder.py \
    --config.data_dir=/data/flowers

The tree is `train/CLASS/*` beside `val/CLASS/*` (or `test/CLASS/*`), or
plain `CLASS/*`, of which a fifth is held out by the hash of the path. All
images are held in memory, resized. No duration or accuracy is given here
because both belong to the images.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  """The configuration; every value can be set on the command line."""
  config = ConfigDict()
  config.experiment = "imagefolder"  # Name in the rows.

  # Data.
  config.data = "imagefolder"
  config.data_dir = ""  # Must be given.
  config.image_size = 64  # Height and width after resizing, in pixels.

  # Model.
  config.model = "cnn"
  config.channels = (32, 64, 64, 64, 64)  # Outputs of each convolution.
  config.hidden = 128  # Width of the layer before the classifier.

  # Exchanges, compared on the same seeds and batches.
  config.exchanges = ("fp32", "int8", "int4_feedback")
  config.seeds = (0,)  # Of the initial parameters and the batches.
  config.workers = 4  # Devices; emulated on the CPU where there are fewer.

  # Optimisation.
  config.steps = 2000  # Of each run.
  config.batch_size = 64  # Over all workers.
  config.optimizer = "sgd"  # sgd (Nesterov) or adamw.
  config.learning_rate = 0.05  # At the peak; a cosine takes it to zero.
  config.warmup_steps = 100  # From zero to the peak.
  config.momentum = 0.9  # b1 of adamw.
  config.weight_decay = 5e-4

  config.checkpoint_every = 200  # Steps; only with --workdir.
  return config
