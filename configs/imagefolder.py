r"""A CNN on a tree of image files, one folder per class.

  python -m experiments.train --config=configs/imagefolder.py \
    --config.data_dir=/data/flowers

The tree is `train/CLASS/*` beside `val/CLASS/*` (or `test/CLASS/*`), or
plain `CLASS/*`, of which a fifth is held out by the hash of the path. All
images are held in memory, resized. No duration or accuracy is given here
because both belong to the images.
"""

from ml_collections import ConfigDict

from experiments.train.base_config import cnn_config


def get_config() -> ConfigDict:
  """Returns the configuration; `data_dir` must be given."""
  channels = (32, 64, 64, 64, 64)
  config = cnn_config("imagefolder", "imagefolder", channels)
  config.image_size = 64  # Height and width after resizing, in pixels.
  config.exchanges = ("fp32", "int8", "int4_feedback")
  config.seeds = (0,)  # Seeds of the initial parameters and the batches.
  config.steps = 2000  # Steps of each run.
  config.batch_size = 64  # Examples over all workers.
  config.warmup_steps = 100  # Steps from zero to the peak.
  config.checkpoint_every = 200  # Steps; only with --workdir.
  return config
