"""Steps of models with many arrays, compiled with codecs and without."""

import jax
import pytest

from experiments import gpu_compile
from experiments.codecs import program_models, tables
from experiments.common import records
from tests.experiments import jobs


@pytest.mark.parametrize("name", program_models.MODELS)
def test_models_have_as_many_arrays_as_their_names_say(name):
  model = program_models.MODELS[name]()
  params = {
    key: jax.ShapeDtypeStruct(shape, "float32")
    for key, shape in model.params.items()
  }
  assert name == "matrix" or name.endswith(f"_{len(params)}")
  # Models are written as those of users.
  with jax.numpy_rank_promotion("allow"):
    run = jax.value_and_grad(model.loss)
    loss, grads = jax.eval_shape(run, params, model.batch)
  assert loss.shape == ()
  assert grads == params


def run_matrix(path, *flags):
  """Rows of one matrix, plain and in 8 bits, and their table by case."""
  flags = "--models=matrix", "--only_codecs=int8", *flags, f"--json={path}"
  done = jobs.run_module("codecs.programs", *flags)
  assert done.returncode == 0, done.stderr
  rows = records.read_rows(path)
  table = tables.summary_table(rows)
  return rows, {
    f"{model}/{codec}": list(map(float, cells))
    for model, codec, *cells in table.lines
  }


def test_a_step_is_compiled_and_run_beside_plain_jax(tmp_path):
  flags = "--rounds=1", "--repeats=1"
  rows, figures = run_matrix(tmp_path / "rows.jsonl", *flags)
  assert list(figures) == ["matrix/plain", "matrix/int8"]
  assert {row.metric for row in rows} == {
    metric
    for metric, (experiment, _) in tables.PROGRAM_UNITS.items()
    if experiment == tables.PROGRAMS
  }
  for seconds, ratio, *_ in figures.values():
    assert seconds >= 0 and ratio > 0


@pytest.mark.skipif(
  gpu_compile.explain_refusal() is not None,
  reason="XLA's compiler for GPUs is not installed",
)
def test_launches_are_those_of_the_step_compiled_for_gpus(tmp_path):
  _, figures = run_matrix(tmp_path / "rows.jsonl", "--compiled")
  plain, added = figures["matrix/plain"]
  launches, added_by_codec = figures["matrix/int8"]
  assert added == 0 < plain < launches
  assert launches - plain == added_by_codec
