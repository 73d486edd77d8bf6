import ast

import numpy as np
import pytest
from PIL import Image

from experiments.common.console import JobError
from experiments.common.names import check_fields
from experiments.study import cases as study_cases
from experiments.study.run import run_experiment as run_study
from experiments.train import cases as train_cases, tasks
from experiments.train.mesh import make_mesh
from experiments.train.run import run_experiment as run_training, train_all
from experiments.weights import cases as weights_cases, run as weights_run
from experiments.weights.context import load_context
from tests.paths import ROOT

EVERY = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))
HOSTED = [name for name in EVERY if name.startswith("weights_")]
STUDIES = [name for name in EVERY if name.startswith("study_")]
# All exchanges of digits are trained in train/test_trainer.py.
CONFIGS = [name for name in EVERY if name not in (*HOSTED, *STUDIES, "digits")]
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


@pytest.mark.parametrize("name", CONFIGS)
def test_small_form_runs(tiny, request, name):
  of_files = name in ("cifar10", "imagefolder")
  config = tiny(name, **(request.getfixturevalue(name) if of_files else {}))
  config.exchanges = config.exchanges[-1:]
  task = tasks.load_task(config)
  (run,) = train_all(config, task, make_mesh(config.workers))
  assert np.isfinite([run.score, run.loss]).all()
  assert run.wire_bytes > 0


# AlexNet is trained in weights/test_weights.py.
@pytest.mark.parametrize("name", [n for n in HOSTED if "alexnet" not in n])
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
def test_cases_exist_and_the_docstring_gives_the_command(load_config, name):
  config = load_config(name)
  field, known = RUNNERS[runner_of(name)]
  check_fields(config, field)
  assert config[field][0] == "fp32"
  assert set(config[field]) <= known
  if name in STUDIES:
    # Else the last steps of local updates would never be exchanged.
    steps = (*config.lengths, config.trial_steps)
    assert all(count % study_cases.EVERY == 0 for count in steps)
  path = ROOT / "configs" / f"{name}.py"
  docstring = ast.get_docstring(ast.parse(path.read_text()))
  runner = f"python -m experiments.{runner_of(name)}"
  assert f"{runner} --config=configs/{name}.py" in docstring


JOBS = {
  "digits": (run_training, "exchanges"),
  "study_decoder": (run_study, "algorithms"),
  "weights_vgg": (weights_run.run_experiment, "cases"),
}
REFUSED = [
  ("steps", 0, "`config.steps` must be an integer >= 1, got 0"),
  ("batch_size", -8, "`config.batch_size` must be an integer >= 1, got -8"),
  ("checkpoint_every", 0, "`config.checkpoint_every` must be an integer"),
  ("seeds", (), r"`config.seeds` must have one item or more, .* got \(\)"),
  ("seeds", (1, 1), r"`config.seeds` must have .* each once, got \(1, 1\)"),
  ("cases", (), "` must have one item or more"),
  ("cases", ("fp32", "int7"), r"`config.\w+` must be one of .*got 'int7'"),
]
# Of jobs of several workers.
REFUSED_WORKERS = [
  ("workers", 0, "`config.workers` must be an integer >= 1, got 0"),
  ("batch_size", 7, "must be a multiple of the . workers, got 7"),
]


@pytest.mark.parametrize("name", JOBS)
def test_a_job_refuses_wrong_fields_before_any_work(load_config, name):
  run, cases = JOBS[name]
  others = [] if name == "weights_vgg" else REFUSED_WORKERS
  for field, value, message in REFUSED + others:
    config = load_config(name)
    config[cases if field == "cases" else field] = value
    with pytest.raises(JobError, match=message):
      run(config)
