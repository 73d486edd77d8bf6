"""Fields of configurations that a job cannot have."""

import pytest

from experiments.common.console import JobError
from experiments.study.run import run_experiment as run_study
from experiments.train.run import run_experiment as run_training
from experiments.weights.run import run_experiment as run_weights

JOBS = {
  "digits": (run_training, "exchanges"),
  "study_digits": (run_study, "algorithms"),
  "weights_vgg": (run_weights, "cases"),
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


def check_refused(config, run, field, value, message):
  config[field] = value
  with pytest.raises(JobError, match=message):
    run(config)


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize(("field", "value", "message"), REFUSED)
def test_a_job_refuses_them_before_any_work(
  load_config, name, field, value, message
):
  run, cases = JOBS[name]
  field = cases if field == "cases" else field
  check_refused(load_config(name), run, field, value, message)


@pytest.mark.parametrize("name", ["digits", "study_digits"])
@pytest.mark.parametrize(("field", "value", "message"), REFUSED_WORKERS)
def test_a_job_of_workers_refuses_them_before_any_work(
  load_config, name, field, value, message
):
  check_refused(load_config(name), JOBS[name][0], field, value, message)
