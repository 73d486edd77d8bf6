"""Starters of cluster jobs: they parse, agree, and start what trains."""

import ast
import importlib.util
import subprocess

import yaml

from examples.cluster import train
from tests.paths import ROOT

FOLDER = ROOT / "examples" / "cluster"
MODULE = "examples.cluster.train"


def test_the_batch_script_of_slurm_starts_one_process_a_host():
  path = FOLDER / "slurm.sh"
  subprocess.run(["bash", "-n", str(path)], check=True)
  text = path.read_text()
  options = dict(
    line.removeprefix("#SBATCH --").split("=")
    for line in text.splitlines()
    if line.startswith("#SBATCH")
  )
  assert options["ntasks-per-node"] == "1"
  # Options come before the first command, or Slurm does not read them.
  assert text.rindex("#SBATCH") < text.index("set -euo")
  assert f"-m {MODULE}" in text
  assert importlib.util.find_spec(MODULE)


def test_pods_of_the_job_set_agree_on_their_number_and_coordinator():
  jobs = yaml.safe_load((FOLDER / "jobset.yaml").read_text())
  (group,) = jobs["spec"]["replicatedJobs"]
  job = group["template"]["spec"]
  assert job["completionMode"] == "Indexed"
  (container,) = job["template"]["spec"]["containers"]
  given = {entry["name"]: entry["value"] for entry in container["env"]}
  assert int(given["NUM_PROCESSES"]) == job["completions"] == job["parallelism"]
  name = jobs["metadata"]["name"]
  host, port = given["COORDINATOR_ADDRESS"].split(":")
  assert host == f"{name}-{group['name']}-0-0.{name}"
  assert [p["containerPort"] for p in container["ports"]] == [int(port)]
  assert container["command"][-2:] == ["-m", MODULE]
  read = (FOLDER / "train.py").read_text()
  for variable in (*given, "JOB_COMPLETION_INDEX"):
    assert f'"{variable}"' in read


def test_the_driver_of_ray_imports_what_is_there():
  tree = ast.parse((FOLDER / "ray_trainer.py").read_text())
  imported = {
    node.module: [alias.name for alias in node.names]
    for node in ast.walk(tree)
    if isinstance(node, ast.ImportFrom)
  }
  assert imported[MODULE] == ["train"]
  assert imported["ray.train.v2.jax"] == ["JaxTrainer"]
  code = [node for node in tree.body if not isinstance(node, ast.Expr)]
  assert code[-1].end_lineno - code[0].lineno <= 20


def test_what_they_start_trains_and_logs(capsys):
  assert train.train(steps=20) < 1.5
  lines = list(map(ast.literal_eval, capsys.readouterr().out.splitlines()))
  assert [line["step"] for line in lines] == [10, 20]
  assert 7 < lines[-1]["exchange/ratio"] < 8
