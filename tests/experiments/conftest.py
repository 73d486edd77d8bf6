import dataclasses
import functools
import importlib.util
import pathlib
from collections.abc import Callable, Iterator

import jax
import pytest
from absl import flags
from absl.testing import flagsaver
from ml_collections import ConfigDict

from experiments.common import records
from experiments.data import images
from experiments.models import staged
from tests.paths import ROOT

# Fields of a small job: three steps of eight examples on two workers.
TINY = {
  "workers": 2,
  "batch_size": 8,
  "steps": 3,
  "warmup_steps": 1,
  "seeds": (0,),
  "checkpoint_every": 1,
}
TINY_CNN = {"channels": (4, 4), "hidden": 8}
TINY_TRANSFORMER = {
  "layers": 1,
  "width": 8,
  "heads": 2,
  "context": 8,
  "train_bytes": 20_000,
  "test_bytes": 2_000,
}
TINY_HOSTED = {
  "width": 1 / 32,
  "batch_size": 8,
  "steps": 4,
  "warmup_steps": 1,
  "eval_every": 2,
  "budget_every": 2,
  "seeds": (0,),
  "error_threshold": 99.0,
  "profile_width": 1 / 32,
  "profile_size": 32,
  "profile_batch": 8,
  "profile_rounds": 1,
  "checkpoint_every": 2,
}

# Stages to leave out: each kind of stage stays, and one convolution that pools.
LEFT_OUT = {
  "alexnet": ("conv2", "conv3", "conv4", "conv5", "fc2", "fc3"),
  "vgg_a": ("conv2", "conv3", "conv4", "conv5_1", "fc2"),
  "resnet34": ("stage1", "stage2", "stage3", "stage4_rest"),
}


def _load_config(name: str) -> ConfigDict:
  """Returns the configuration of `configs/NAME.py`."""
  path = ROOT / "configs" / f"{name}.py"
  spec = importlib.util.spec_from_file_location(f"config_{name}", path)
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config()


@pytest.fixture(scope="session")
def load_config() -> Callable[[str], ConfigDict]:
  """Loads the configuration of `configs/NAME.py`."""
  return _load_config


@pytest.fixture(scope="session")
def tiny() -> Callable[..., ConfigDict]:
  """Makes a small form of a configuration: tiny("digits", steps=5)."""

  def make(name: str, **fields: object) -> ConfigDict:
    config = _load_config(name)
    small = TINY_CNN if config.model == "cnn" else TINY_TRANSFORMER
    config.update({**TINY, **small, **fields})
    return config

  return make


@pytest.fixture(scope="module")
def tiny_hosted() -> Iterator[Callable[..., ConfigDict]]:
  """Makes a small form of a configuration of `experiments.weights`.

  Its network has fewer stages: each has programs of its own to compile.
  """

  def make(name: str, **fields: object) -> ConfigDict:
    config = _load_config(name)
    config.update({**TINY_HOSTED, **fields})
    return config

  with pytest.MonkeyPatch.context() as patch:
    for name, describe in staged.NETWORKS.items():

      def shallow(*args, describe=describe, left_out=LEFT_OUT[name]):
        network = describe(*args)
        stages = [s for s in network.stages if not s.name.startswith(left_out)]
        return dataclasses.replace(network, stages=tuple(stages))

      patch.setitem(staged.NETWORKS, name, shallow)
    yield make


@pytest.fixture(scope="session", autouse=True)
def enough_devices() -> None:
  assert jax.device_count() >= TINY["workers"], "see tests/conftest.py"


@pytest.fixture(scope="session", autouse=True)
def cached_images() -> Iterator[None]:
  """Lets each process read scikit-learn's images once."""
  with pytest.MonkeyPatch.context() as patch:
    for name in ("load_digits", "load_photographs"):
      patch.setattr(images, name, functools.cache(getattr(images, name)))
    yield


@pytest.fixture(scope="session", autouse=True)
def parsed_flags() -> None:
  """Lets tests set flags and call the `main` of a runner."""
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


@pytest.fixture
def run_main(
  tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[list[records.Row], str]]:
  """Calls the `main` of a runner; returns its rows and what it printed.

  Calls of a test write to one file of rows: run_main(main, plot=True, seed=0).
  """

  def run(
    main: Callable[[], None], *, plot: bool = False, **given: object
  ) -> tuple[list[records.Row], str]:
    rows, drawn = tmp_path / "rows.jsonl", tmp_path / "plot.png"
    given |= {"plot": str(drawn)} if plot else {}
    with flagsaver.flagsaver(json=str(rows), **given):
      main()
    said = capsys.readouterr().out
    assert "\x1b[" not in said
    assert not plot or drawn.read_bytes().startswith(b"\x89PNG")
    return records.read_rows(rows), said

  return run
