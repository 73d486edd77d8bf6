import os

# Before JAX starts: most tests need several workers.
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
