"""Chooses how each test's programs are compiled, those of examples too."""

import pathlib

import jax
import pytest

from tests import compile_fast

# Folders whose tests are about Python: which calls are refused, what is planned
# and predicted, how jobs run, how steps of other people are changed, which
# collectives a step consists of. Each of their programs runs a few times, so
# that XLA's optimizations take longer than they save. So do those of one codec
# or collective: the contract and the frozen payloads of all codecs hold the
# bits of what users run. All other tests, and those that ask what a compiled
# program computes or keeps, run that too. Nobody runs the interpreted kernels,
# whose files are named after Pallas. The examples of docstrings and pages show
# what tests compute. Other tests bear a mark.
_UNOPTIMIZED = (
  *("arguments", "calibration", "checkpoint", "codecs", "collectives"),
  *("controllers", "core", "examples", "hetero", "linen", "monitor", "wire"),
  *("nnx", "perfmodel", "planner", "presets", "program", "testing"),
  *("transforms", "memory", "experiments"),
)
# The exceptions within these: bits are compared with those of other programs,
# or the compiler itself is tested.
_OPTIMIZED = (
  *("codecs/test_contract.py", "codecs/test_frozen.py"),
  "collectives/test_compile_time.py",
)
_TESTS = pathlib.Path(__file__).parent

compile_fast.install()


def pytest_configure(config: pytest.Config) -> None:
  for name, how in (("unoptimized", "fast"), ("optimized", "as users do")):
    line = f"{name}: compiles {how}; see tests/compile_choice.py"
    config.addinivalue_line("markers", line)


def pytest_runtest_setup(item: pytest.Item) -> None:
  """Compiles with or without optimizations, as the test's folder says."""

  def is_in(names: tuple[str, ...]) -> bool:
    return any(item.path.is_relative_to(_TESTS / name) for name in names)

  def has_mark(name: str) -> bool:
    return item.get_closest_marker(name) is not None

  is_pallas = item.path.name.startswith("test_pallas_")
  if has_mark("optimized") or is_in(_OPTIMIZED):
    unoptimized = has_mark("unoptimized")
  elif item.path.is_relative_to(_TESTS):
    unoptimized = is_in(_UNOPTIMIZED) or is_pallas or has_mark("unoptimized")
  else:
    unoptimized = True
  if compile_fast.choose(unoptimized):
    jax.clear_caches()
