import gc
import os
import pathlib

# Before JAX starts: most tests need several workers.
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import pytest

from tests import compile_fast

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

# Folders whose tests are about Python: which calls are refused, what is planned
# and predicted, how jobs run, how steps of other people are changed, which
# collectives a step consists of. Each of their programs runs a few times, so
# that XLA's optimizations take longer than they save. All other tests, and
# those that ask what a compiled program computes or keeps, run what users run.
# Nobody runs the interpreted kernels, whose files are named after Triton. Other
# tests bear a mark.
_UNOPTIMIZED = (
  *("adapters", "arguments", "checkpoint", "controllers", "hetero", "linen"),
  *("nnx", "perfmodel", "planner", "presets", "program", "testing"),
  "transforms",
  *("memory/state", "memory/weights"),
  *("collectives/test_byte_planes.py", "collectives/test_hierarchical.py"),
  *("collectives/test_scatter_gather.py", "collectives/test_unshard.py"),
  *("experiments/activations", "experiments/codecs", "experiments/common"),
  *("experiments/data", "experiments/fuzz", "experiments/hosts"),
  *("experiments/kernels", "experiments/models", "experiments/perfmodel"),
  *("experiments/planner", "experiments/residuals/test_accuracy.py"),
  *("experiments/residuals/test_streamed.py", "experiments/state"),
  *("experiments/test_configs.py", "experiments/train", "experiments/weights"),
)
_TESTS = pathlib.Path(__file__).parent

compile_fast.install()


def pytest_configure(config: pytest.Config) -> None:
  config.addinivalue_line(
    "markers", "unoptimized: compiles fast; see tests/conftest.py"
  )


def pytest_runtest_setup(item: pytest.Item) -> None:
  """Compiles with or without optimizations, as the test's folder says."""
  unoptimized = (
    any(item.path.is_relative_to(_TESTS / name) for name in _UNOPTIMIZED)
    or item.path.name.endswith("triton.py")
    or item.get_closest_marker("unoptimized") is not None
  )
  if compile_fast.choose(unoptimized):
    jax.clear_caches()


def pytest_collection_finish(session: pytest.Session) -> None:
  """Lets the garbage collector pass over modules and tests, which stay.

  Tracing makes many objects at once, so that the collector would otherwise look
  at all of them hundreds of times. At the end pytest collects whatever is left.
  """
  gc.collect()
  gc.freeze()
  gc.set_threshold(100_000, 50, 20)
