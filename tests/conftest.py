import os
import pathlib

# Before JAX starts: most tests need several workers.
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
# What XLA has made is not made again: not in the other process of pytest, not
# in the next run. An entry is named by the hash of program, flags and versions;
# --cache-clear forgets them. Not in the environment: jobs that tests start
# compile for themselves.
jax.config.update(
  "jax_compilation_cache_dir",
  str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "d" / "jax"),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
