"""Steps of models with many arrays, compiled with codecs and without."""

import jax
import pytest

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


def test_a_step_is_compiled_and_run_beside_plain_jax(tmp_path):
  path = tmp_path / "rows.jsonl"
  flags = "--models=matrix", "--only_codecs=int8", "--rounds=1", "--repeats=1"
  done = jobs.run_module("codecs.programs", *flags, f"--json={path}")
  assert done.returncode == 0, done.stderr
  rows = records.read_rows(path)
  cases = "matrix/plain", "matrix/int8"
  assert [(row.case, row.metric) for row in rows] == [
    (case, metric) for case in cases for metric in tables.PROGRAM_UNITS
  ]
  table = tables.programs_table(rows)
  for (model, codec, *figures), case in zip(table.lines, cases, strict=True):
    assert f"{model}/{codec}" == case
    seconds, ratio, *_ = map(float, figures)
    assert seconds >= 0 and ratio > 0
