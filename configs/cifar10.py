"""A CNN on CIFAR-10, read from files that are already on this machine.

  python -m experiments.train --config=configs/cifar10.py \
    --config.data_dir=/data/cifar-10-batches-bin

The folder holds `data_batch_*.bin` and `test_batch.bin` (the "binary
version"), or one .npz with x_train, y_train, x_test, y_test. No duration or
accuracy is given here because none has been measured.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  """The configuration; every value can be set on the command line."""
  config = ConfigDict()
  config.experiment = "cifar10"  # Name in the rows.

  # Data: 50 000 images to learn from, 10 000 held out, of 32 x 32 pixels.
  config.data = "cifar10"
  config.data_dir = ""  # Must be given.

  # Model: 0.2 million parameters.
  config.model = "cnn"
  config.channels = (32, 64, 64, 64)  # Outputs of each convolution.
  config.hidden = 128  # Width of the layer before the classifier.

  # Exchanges, compared on the same seeds and batches.
  config.exchanges = (
    "fp32",
    "bf16",
    "int8",
    "int4_feedback",
    "topk1_feedback",
    "sign_feedback",
  )
  config.seeds = (0, 1, 2)  # Of the initial parameters and the batches.
  config.workers = 4  # Devices; emulated on the CPU where there are fewer.

  # Optimisation.
  config.steps = 8000  # Of each run: about 40 epochs.
  config.batch_size = 256  # Over all workers.
  config.optimizer = "sgd"  # sgd (Nesterov) or adamw.
  config.learning_rate = 0.05  # At the peak; a cosine takes it to zero.
  config.warmup_steps = 400  # From zero to the peak.
  config.momentum = 0.9  # b1 of adamw.
  config.weight_decay = 5e-4

  config.checkpoint_every = 500  # Steps; only with --workdir.
  return config
