"""A byte-level transformer on the source text of Python's standard library.

  python -m experiments.train --config=configs/bytes_lm.py

Takes about 2 minutes on 2 cores. Expect 3.04 bits/byte for fp32, 0.02 more for
int8 and 0.04 more for int4_feedback. zlib -9 compresses the held-out text to
2.07 bits/byte: 400 steps are enough to compare exchanges, not to compress
source code. The corpus depends on the version of Python (these numbers:
3.11.7), so the rows name its SHA-256.
"""

from ml_collections import ConfigDict

from experiments.train.base_config import text_config


def get_config() -> ConfigDict:
  """Returns the configuration of the job."""
  config = text_config("bytes_lm")
  config.exchanges = ("fp32", "int8", "int4_feedback")
  config.seeds = (0,)  # Seeds of the initial parameters and the batches.

  # Optimization.
  config.steps = 400  # Steps of each run.
  config.batch_size = 32  # Windows of text over all workers.
  config.optimizer = "adamw"
  config.learning_rate = 3e-3  # Peak; a cosine takes it to zero.
  config.warmup_steps = 40  # Steps from zero to the peak.
  config.weight_decay = 0.01
  return config
