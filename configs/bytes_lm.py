"""A byte-level transformer on the source text of Python's standard library.

  python -m experiments.train --config=configs/bytes_lm.py

Takes about 2 minutes on 2 cores. Expect 3.04 bits/byte for fp32, 0.02 more for
int8 and 0.04 more for int4_feedback. That is far from what zlib -9 makes of the
held-out text (2.07 bits/byte): 400 steps are enough to compare exchanges, not
to compress source code. The corpus depends on the version of Python (these
numbers: 3.11.7), so the rows name its SHA-256.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  """The configuration; every value can be set on the command line."""
  config = ConfigDict()
  config.experiment = "bytes_lm"  # Name in the rows.

  # Data: *.py in the order of their paths, without tests and site-packages.
  config.data = "stdlib"
  config.data_dir = ""  # Another folder of *.py files to read instead.
  config.train_bytes = 4_000_000  # Upper bounds; about a tenth of the files,
  config.test_bytes = 100_000  # chosen by the hash of their path, is held out.

  # Model: 0.4 million parameters.
  config.model = "transformer"
  config.layers = 2  # Blocks.
  config.width = 128  # Of the residual stream.
  config.heads = 4  # Of attention.
  config.context = 64  # Bytes the model sees.

  # Exchanges, compared on the same seeds and batches.
  config.exchanges = ("fp32", "int8", "int4_feedback")
  config.seeds = (0,)  # Of the initial parameters and the batches.
  config.workers = 4  # Devices; emulated on the CPU where there are fewer.

  # Optimisation.
  config.steps = 400  # Of each run.
  config.batch_size = 32  # Windows of text over all workers.
  config.optimizer = "adamw"  # sgd (Nesterov) or adamw.
  config.learning_rate = 3e-3  # At the peak; a cosine takes it to zero.
  config.warmup_steps = 40  # From zero to the peak.
  config.momentum = 0.9  # b1 of adamw.
  config.weight_decay = 0.01

  config.checkpoint_every = 100  # Steps; only with --workdir.
  return config
