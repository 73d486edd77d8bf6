import gc
import os
import pathlib

# Before JAX starts: most tests need several workers.
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
# Locations in programs would cost a tenth of the time of tests that trace much.
jax.config.update("jax_traceback_in_locations_limit", 0)
# What XLA has made is not made again: not in the other process of pytest, not
# in the next run. An entry is named by the hash of program, flags and versions;
# --cache-clear forgets them. Not in the environment: jobs that tests start
# compile for themselves.
jax.config.update(
  "jax_compilation_cache_dir",
  str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "d" / "jax"),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def pytest_collection_finish(session: pytest.Session) -> None:
  """Lets the garbage collector pass over modules and tests, which stay.

  Tracing makes many objects at once, so that the collector would otherwise look
  at all of them hundreds of times. At the end pytest collects whatever is left.
  """
  gc.collect()
  gc.freeze()
  gc.set_threshold(100_000, 50, 20)
