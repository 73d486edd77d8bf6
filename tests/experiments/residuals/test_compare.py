import jax
import pytest
from absl import flags
from absl.testing import flagsaver

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
from tests.experiments.jobs import run_module

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

def make_vector():
  return lambda params, x: params * x, jnp.ones(3), jnp.ones(3)

def make_pair():
  return 1, 2

def make_text():
  return lambda params, batch: params.sum(), jnp.ones(3), ["train"]

def raise_error():
  raise OSError("no data\\nhere")

NUMBER = 3
"""
POLICIES = ["jax_block_nothing", "ours", "ours_8bits"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  path = tmp_path_factory.mktemp("model") / "model.py"
  path.write_text(MODEL)
  return path


def run_command(model, folder, **changes):
  flags.FLAGS.mark_as_parsed()
  options = {
    "file": [f"{model}:make_loss"],
    "policies": POLICIES,
    "target": "cpu",
    "match": False,
    "json": f"{folder}/rows.jsonl",
    "plot": f"{folder}/plot.png",
  }
  with flagsaver.flagsaver(**(options | changes)):
    compare.main()
  return records.read_rows(f"{folder}/rows.jsonl")


def test_a_file_is_compared_once_and_its_rows_are_kept(model, tmp_path, capsys):
  found = run_command(model, tmp_path)
  cases = {row.case for row in found}
  assert cases == {f"model.make_loss/{p}" for p in ["plain", *POLICIES]}
  assert {row.metric for row in found} == {
    *("temp_bytes", "flops", "step_ms_predicted", "trace_s", "compile_s")
  }
  for row in found:
    plain = next(
      r.value
      for r in found
      if r.case.endswith("/plain") and r.metric == row.metric
    )
    assert row.ratio == pytest.approx(row.value / plain)
  assert (tmp_path / "plot.png").stat().st_size > 1000
  assert "Ours beside stock policies" in capsys.readouterr().out
  again = run_command(model, tmp_path, plot=None)
  assert capsys.readouterr().out.count("in the file already") == len(cases)
  assert again == found  # Times would differ if they were measured again.
  fresh = run_command(model, tmp_path, plot=None, policies=[], fresh=True)
  assert "in the file already" not in capsys.readouterr().out
  assert len(fresh) == len(found) and fresh != found


def test_budgets_are_searched_where_a_stock_policy_holds_less(model):
  subject = Subject("model", load_task(f"{model}:make_loop"))
  # Plain `ours` cannot hold as little as `jax.checkpoint` around each block.
  rows = compare.compare_models([subject], POLICIES[:2], "cpu")
  budgets = {row.case for row in rows if "/ours_budget_" in row.case}
  flops = {row.case: row.value for row in rows if row.metric == "flops"}
  assert len(budgets) == 1
  assert flops[budgets.pop()] <= 1.001 * flops["model/jax_block_nothing"]


def test_only_predictions_are_made_again_if_only_they_are_old(
  model, tmp_path, capsys
):
  path = tmp_path / "rows.jsonl"
  found = run_command(model, tmp_path, plot=None, policies=[])
  old = [
    r._replace(value=0.5, machine="another version")
    if r.metric in ("flops", "step_ms_predicted")
    else r
    for r in found
  ]
  records.write_rows(path, old)
  again = run_command(model, tmp_path, plot=None, policies=[])
  assert again == found  # Times would differ if it was compiled again.
  assert "in the file already" not in capsys.readouterr().out


def test_a_changed_file_is_measured_again(model, tmp_path, capsys):
  copy = tmp_path / "model.py"
  copy.write_text(MODEL)
  run_command(copy, tmp_path, plot=None, policies=[])
  copy.write_text(MODEL.replace("mean", "sum"))
  run_command(copy, tmp_path, plot=None, policies=[])
  assert "in the file already" not in capsys.readouterr().out


def test_a_policy_that_fails_does_not_end_the_run(capsys):
  def fail(params, x):
    raise ValueError("too\nlarge")

  def make_task(wrap=None):
    task = Task(lambda w, x: (w * x).sum(), SHAPE, SHAPE)
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


SHAPE = jax.ShapeDtypeStruct((8,), "float32")


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


@pytest.mark.parametrize(
  ("name", "match"),
  [
    ("make_vector", r"must return one floating-point number, got .*\(3,\)"),
    ("make_pair", r"must return \(loss_fn, params, batch\), got a tuple of 2"),
    ("make_text", "`batch` must hold arrays or shapes, got 'train'"),
    ("raise_error", r"raises OSError: no data here"),
    ("NUMBER", "must name a function of .*, got 'NUMBER'"),
    ("nothing", "must name a function of .*, got 'nothing'"),
  ],
)
def test_files_that_give_no_loss_are_refused_in_one_line(model, name, match):
  with pytest.raises(JobError, match=match) as caught:
    load_task(f"{model}:{name}")
  assert "\n" not in str(caught.value)


def test_files_that_are_not_there_are_refused(tmp_path):
  with pytest.raises(JobError, match="must be FILE.py:FUNCTION, got 'model'"):
    load_task("model")
  with pytest.raises(JobError, match="must name a file that exists"):
    load_task(f"{tmp_path}/none.py:make_loss")


def test_patterns_that_match_no_policy_are_refused(model, tmp_path):
  with pytest.raises(JobError, match="must match a policy .* got 'jax_dots'"):
    run_command(model, tmp_path, policies=["ours*", "jax_dots"])


@pytest.mark.skipif(
  gpu_compile.explain_refusal() is None, reason="it can be compiled"
)
def test_without_the_compiler_the_command_says_so_and_ends_well():
  done = run_module("residuals.compare", "--models=norm_dense", "--target=h100")
  assert done.returncode == 0, done.stderr
  assert "Nothing can be compiled for h100: " in done.stdout
