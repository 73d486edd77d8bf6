import jax
import pytest

from experiments import gpu_compile
from experiments.common import records
from experiments.common.console import JobError
from experiments.models.losses import Task
from experiments.residuals import compare, measure
from experiments.residuals.compare import Subject, load_task
from experiments.residuals.policies import (
  count_flops_alone,
  find_budget,
  list_policies,
  make_budget,
)

MODEL = """
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

def make_loss(wrap=lambda block: block):
  block = wrap(lambda w, x: jnp.tanh(checkpoint_name(x @ w, "dense")))
  def loss_fn(params, x):
    for own in params:
      x = block(own, x)
    return jnp.mean(x**2)
  like = jax.ShapeDtypeStruct
  return loss_fn, [like((64, 64), "float32")] * 2, like((256, 64), "float32")

def make_loop(wrap=lambda block: block):
  block = wrap(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w.T))
  def loss_fn(params, x):
    x, _ = jax.lax.scan(lambda x, own: (block(own, x), None), x, params)
    return jnp.mean(x**2)
  like = jax.ShapeDtypeStruct
  return loss_fn, like((4, 64, 512), "float32"), like((256, 64), "float32")

def raise_error():
  raise OSError("no data\\nhere")
"""
POLICIES = ["jax_block_nothing", "ours", "ours_8bits"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  path = tmp_path_factory.mktemp("model") / "model.py"
  path.write_text(MODEL)
  return path


@pytest.fixture
def run_command(model, run_main):
  options = {"file": [f"{model}:make_loss"], "policies": POLICIES}
  options |= {"target": "cpu", "match": False}
  return lambda **changes: run_main(compare.main, **(options | changes))


def test_what_holds_still_in_a_file_of_rows_is_not_measured_again(
  run_command, tmp_path
):
  found, said = run_command(plot=True)
  cases = {row.case for row in found}
  assert cases == {f"model.make_loss/{p}" for p in ["plain", *POLICIES]}
  plain = {r.metric: r.value for r in found if r.case.endswith("/plain")}
  assert set(plain) == {
    *("temp_bytes", "flops", "step_ms_predicted", "trace_s", "compile_s")
  }
  for row in found:
    assert row.ratio == pytest.approx(row.value / plain[row.metric])
  assert "Ours beside stock policies" in said
  again, said = run_command()
  assert said.count("in the file already") == len(cases)
  assert again == found  # Times would differ if they were measured again.
  old = [
    r._replace(value=0.5, machine="another version")
    if r.metric in ("flops", "step_ms_predicted")
    else r
    for r in found
  ]
  records.write_rows(tmp_path / "rows.jsonl", old)
  again, _ = run_command(policies=[])
  # What is predicted was made again; times of compilation were not.
  assert [r for r in again if r.case.endswith("/plain")] == [
    r for r in found if r.case.endswith("/plain")
  ]
  fresh, _ = run_command(policies=[], fresh=True)
  assert len(fresh) == len(found) and fresh != again
  other = tmp_path / "model.py"
  other.write_text(MODEL.replace("mean", "sum"))
  _, said = run_command(policies=[], file=[f"{other}:make_loss"])
  assert "in the file already" not in said


def test_budgets_are_searched_where_a_stock_policy_holds_less(model):
  subject = Subject("model", load_task(f"{model}:make_loop"))
  # Plain `ours` cannot hold as little as `jax.checkpoint` around each block.
  rows = compare.compare_models([subject], POLICIES[:2], "cpu")
  budgets = {row.case for row in rows if "/ours_budget_" in row.case}
  flops = {row.case: row.value for row in rows if row.metric == "flops"}
  assert len(budgets) == 1
  assert flops[budgets.pop()] <= 1.001 * flops["model/jax_block_nothing"]


def test_a_policy_that_fails_does_not_end_the_run(capsys):
  def fail(params, x):
    raise ValueError("too\nlarge")

  shape = jax.ShapeDtypeStruct((8,), "float32")

  def make_task(wrap=None):
    task = Task(lambda w, x: (w * x).sum(), shape, shape)
    return task if wrap is None else task._replace(loss_fn=fail)

  rows = compare.compare_models(
    [Subject("fails", make_task)], POLICIES[:2], "cpu", match=False
  )
  found = {(row.case, row.metric): row for row in rows}
  failed = found["fails/jax_block_nothing", "temp_bytes"]
  assert failed.value == "none: ValueError: too large"
  assert failed.ratio is None
  assert found["fails/ours", "flops"].ratio >= 1
  assert "none: ValueError" in capsys.readouterr().out


def test_the_fewest_bytes_at_some_flops_are_searched_on_a_device_of_flops(
  model,
):
  task = load_task(f"{model}:make_loop")()
  device = count_flops_alone("cpu")

  def flops(policy):
    return measure.predict_figures(policy.build_step(), 0, "cpu").flops

  least, most = (flops(make_budget(task, share, device)) for share in (1, 0))
  found = find_budget(task, least, "cpu", device)
  assert found.name.startswith("ours_flops_budget_")
  assert flops(found) <= least < most
  assert find_budget(task, 0.99 * least, "cpu", device) is None


def test_policies_of_a_model_without_blocks_are_around_its_loss(model):
  with_hook = load_task(f"{model}:make_loss")
  names = [p.name for p in list_policies(with_hook)]
  assert "jax_block_names" in names and "jax_whole_names" not in names
  task = with_hook()
  names = [p.name for p in list_policies(lambda: task)]
  assert "jax_whole_names" in names
  assert not [name for name in names if "block" in name]


# Other files that are refused: tests/command.
def test_files_and_patterns_that_name_nothing_are_refused(model, run_command):
  with pytest.raises(JobError, match="must be FILE.py:FUNCTION, got 'model'"):
    load_task("model")
  with pytest.raises(JobError, match=r"raises OSError: no data here$"):
    load_task(f"{model}:raise_error")
  with pytest.raises(JobError, match="must match a policy .* got 'jax_dots'"):
    run_command(policies=["ours*", "jax_dots"])


@pytest.mark.skipif(
  gpu_compile.explain_refusal() is None, reason="it can be compiled"
)
def test_without_the_compiler_the_command_says_so(run_command, tmp_path):
  (tmp_path / "rows.jsonl").touch()
  rows, said = run_command(target="h100")
  assert not rows and "Nothing can be compiled for h100: " in said
