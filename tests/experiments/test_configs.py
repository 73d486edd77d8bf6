import ast

import numpy as np
import pytest
from PIL import Image

from experiments.common.names import check_fields
from experiments.study import cases as study_cases
from experiments.train import cases as train_cases, tasks
from experiments.train.mesh import make_mesh
from experiments.train.run import train_all
from experiments.weights import cases as weights_cases, run as weights_run
from experiments.weights.context import load_context
from tests.paths import ROOT

EVERY = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))
HOSTED = [name for name in EVERY if name.startswith("weights_")]
STUDIES = [name for name in EVERY if name.startswith("study_")]
CONFIGS = [name for name in EVERY if name not in (*HOSTED, *STUDIES)]
RNG = np.random.default_rng(0)


@pytest.fixture
def cifar10(tmp_path):
  for name, count in (("data_batch_1", 20), ("test_batch", 10)):
    records = RNG.integers(0, 256, (count, 3073), dtype=np.uint8)
    records[:, 0] %= 10
    records.tofile(tmp_path / f"{name}.bin")
  return {"data_dir": str(tmp_path)}


@pytest.fixture
def imagefolder(tmp_path):
  for i in range(30):
    path = tmp_path / ("train", "val")[i % 3 == 0] / "ab"[i % 2] / f"{i}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = RNG.integers(0, 256, (12, 12, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
  return {"data_dir": str(tmp_path), "image_size": 16}


@pytest.fixture
def digits():
  return {}


@pytest.fixture
def digits_sharded():
  return {}


@pytest.fixture
def bytes_lm():
  return {}


@pytest.mark.parametrize("name", CONFIGS)
def test_small_form_runs(tiny, request, name):
  config = tiny(name, **request.getfixturevalue(name))
  config.exchanges = config.exchanges[:: len(config.exchanges) - 1]
  task = tasks.load_task(config)
  runs = train_all(config, task, make_mesh(config.workers))
  assert len(runs) == 2
  assert all(np.isfinite([run.score, run.loss]).all() for run in runs)
  assert runs[0].wire_bytes > runs[1].wire_bytes > 0


@pytest.mark.parametrize("name", HOSTED)
def test_small_form_of_hosted_weights_runs(tiny_hosted, name):
  context = load_context(tiny_hosted(name, cases=("truncate1",)))
  (run,) = weights_run.train_all(context)
  assert np.isfinite([run.error, run.loss]).all()
  assert run.returned_bytes > 3 * run.sent_bytes > 0


RUNNERS = {
  "weights": ("cases", set(weights_cases.CASES)),
  "study": ("algorithms", set(study_cases.ALGORITHMS)),
  "train": ("exchanges", {*train_cases.EXCHANGES, *train_cases.SHARDED}),
}


def runner_of(name):
  return next((r for r in RUNNERS if name.startswith(f"{r}_")), "train")


@pytest.mark.parametrize("name", EVERY)
def test_cases_exist_and_begin_with_the_baseline(load_config, name):
  config = load_config(name)
  field, known = RUNNERS[runner_of(name)]
  check_fields(config, field)
  assert config[field][0] == "fp32"
  assert set(config[field]) <= known
  if name in STUDIES:
    # Else the last steps of local updates would never be exchanged.
    steps = (*config.lengths, config.trial_steps)
    assert all(count % study_cases.EVERY == 0 for count in steps)


@pytest.mark.parametrize("name", EVERY)
def test_docstring_gives_the_command(name):
  path = ROOT / "configs" / f"{name}.py"
  docstring = ast.get_docstring(ast.parse(path.read_text()))
  runner = f"python -m experiments.{runner_of(name)}"
  assert f"{runner} --config=configs/{name}.py" in docstring
