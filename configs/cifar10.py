r"""A CNN on CIFAR-10, read from files that are already on this machine.

  python -m experiments.train --config=configs/cifar10.py \
    --config.data_dir=/data/cifar-10-batches-bin

The folder holds `data_batch_*.bin` and `test_batch.bin` (the "binary
version"), or one .npz with x_train, y_train, x_test, y_test. No duration or
accuracy is given here because none has been measured.
"""

from ml_collections import ConfigDict

from experiments.train.base_config import cnn_config


def get_config() -> ConfigDict:
  """Returns the configuration; `data_dir` must be given."""
  # 50 000 images to learn from and 10 000 held out, of 32 x 32 pixels. 0.2
  # million parameters.
  config = cnn_config("cifar10", "cifar10", channels=(32, 64, 64, 64))
  config.steps = 8000  # Steps of each run: about 40 epochs.
  config.batch_size = 256  # Examples over all workers.
  config.warmup_steps = 400  # Steps from zero to the peak.
  config.checkpoint_every = 500  # Steps; only with --workdir.
  return config
