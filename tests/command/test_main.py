"""What the command line prints, and how it ends."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest

from jaxmotion import __main__, perfmodel
from jaxmotion.command import main
from jaxmotion.planner.exchange import _algorithms
from tests.paths import ROOT

MODEL = """
import jax, jax.numpy as jnp
LIKE = jax.ShapeDtypeStruct
def make_loss():
  def loss_fn(params, x):
    def layer(x, w):
      return x + jnp.tanh(jnp.tanh(x @ w) @ w.T), None
    return jnp.mean(jax.lax.scan(layer, x, params["layers"])[0] ** 2)
  params = {"layers": LIKE((4, 256, 256), "float32")}
  return loss_fn, params, LIKE((512, 256), "float32")
def make_small():
  weights = LIKE((64, 64), "float32")
  return lambda w, x: jnp.mean(jnp.tanh(x @ w)), weights, weights
def make_pair():
  return 1, 2
def make_error():
  raise KeyError("nothing")
def make_wrong_loss():
  batch = (LIKE((2,), "float32"),)
  return lambda params, x: x["image"], LIKE((3,), "float32"), batch
def make_table():
  params = {"w": LIKE((3,), "float32"), "table": [LIKE((2,), "int32")]}
  return lambda params, x: params["w"].sum(), params, ()
def make_vector():
  return lambda params, x: params, LIKE((3,), "float32"), ()
"""


@pytest.fixture
def model(tmp_path):
  path = tmp_path / "model.py"
  path.write_text(MODEL)
  return f"{path}:make_loss"


def run(capsys, *arguments, answers=()):
  answers = iter(answers)

  def ask(question):
    try:
      return next(answers)
    except StopIteration:
      raise EOFError from None  # As `input` does.

  status = main(arguments, ask)
  said = capsys.readouterr()
  return status, said.out, said.err


@pytest.fixture
def short_table(monkeypatch):
  """Leaves one algorithm in the table of others, which takes seconds."""

  def weigh(problem, step, _):
    local = _algorithms.weigh_period(problem, step)
    return _algorithms.AlgorithmTable([local])

  monkeypatch.setattr(_algorithms, "weigh_algorithms", weigh)


def test_advise_says_what_to_write_and_reduces_within_hosts_first(
  capsys, model, short_table
):
  status, out, err = run(capsys, "advise", model, "--platform=ethernet_1gbit")
  assert status == 0 and err.splitlines() == [TRACING]
  last = out.splitlines()[-1]
  assert re.match(r"jaxmotion.exchange\('data', \w+\(.*\)\)", last)
  assert "not measured" in out
  assert re.search(r"\n`local_updates\(.*\)` would take .* a step", out)
  _, out, _ = run(capsys, "advise", model, "--platform=h100_cluster")
  axes = "jaxmotion.HostAxes(hosts='host', devices='device')"
  assert f"jaxmotion.exchange({axes}, " in out.splitlines()[-1]


def test_advise_does_not_name_an_exchange_that_does_not_fit(
  capsys, model, tmp_path, short_table
):
  platform = perfmodel.builtin_platform("ethernet_1gbit")
  device = dataclasses.replace(platform.device, memory_bytes=1e6)
  path = tmp_path / "small.json"
  small = dataclasses.replace(platform, device=device, sources={})
  perfmodel.save_platform(small, path)
  _, out, _ = run(capsys, "advise", model, f"--platform={path}")
  assert "None fits." in out
  assert out.splitlines()[-1].startswith("The exchange alone does not fit")


def test_fit_says_how_to_meet_the_budget(capsys, model):
  small = model.replace("make_loss", "make_small")
  arguments = ("--platform=h100_node", "--budget=1.5MB")
  status, out, _ = run(capsys, "fit", small, *arguments)
  assert status == 0 and " of 1.5 MB" in out


def test_the_state_of_an_optimizer_takes_memory(capsys, model):
  small = model.replace("make_loss", "make_small")
  arguments = (small, "--platform=h100_node", "--budget=1.5MB")
  used = []
  for given in ((), ("--optimizer=adam(1e-3)",)):
    _, out, _ = run(capsys, "fit", *arguments, *given)
    used.append(float(re.search(r"predicted ([\d.]+) kB of", out)[1]))
  # Two moments of 64 x 64 elements of 4 bytes.
  assert used[1] - used[0] == pytest.approx(2 * 64 * 64 * 4 / 1e3, abs=1)


def test_bytes_are_those_that_cross_between_hosts(capsys, model):
  arguments = ("--platform=h100_cluster", "--workers=3")
  expression = "--codec=feedback(uniform(bits=4))"
  _, out, _ = run(capsys, "bytes", model, *arguments, expression)
  _, _, header, plain, coded = out.splitlines()
  assert header.split()[:4] == ["codec", "MB", "over", "'host'"]
  # Two thirds of a host's part, sent twice: 8 devices share 1 MiB.
  sent = 2 * 2 / 3 * 4 * 256 * 256 * 4 / 8 / 1e6
  assert float(plain.split()[1]) == pytest.approx(sent, abs=1e-3)
  assert 7 < float(coded.split()[2]) < 8


def test_a_platform_is_described_by_answers(capsys, tmp_path, model):
  path = tmp_path / "lab.json"
  answers = "lab other 300 100 2000 40 25 0.5 4 2 25 30 200".split()
  status, out, _ = run(capsys, "platform", str(path), answers=answers)
  assert status == 0 and str(path) in out
  lab = perfmodel.load_platform(path)
  assert [axis.workers for axis in lab.axes] == [4, 2]
  assert lab.axis("host").link.rate == perfmodel.gbit_per_s(25)
  assert lab.device.memory_bytes == 40e9
  assert lab.device.matmul_flops_per_s["bfloat16"] == 150e12
  told = lab.sources["device.matmul_flops_per_s"]
  assert told == "0.5 of the peak, as its user says"
  status, out, _ = run(capsys, "bytes", model, f"--platform={path}")
  assert status == 0 and "8 workers of lab" in out
  share = "--peak_share=0.25"
  status, _, err = run(capsys, "bytes", model, f"--platform={path}", share)
  assert status == 1 and "a share, got 0.25: the matmul rates of 'lab'" in err
  # A device that is known needs no figures.
  answers = ("", "H100", "", "1", "8", "1e-05", "450")
  _, out, err = run(capsys, "platform", str(path), answers=answers)
  assert (
    "`rate` must be between 100000 and 1e+13 bytes/s, got 1e-05 GB/s" in err
  )
  assert "axes.device.latency_s: assumed: 5 us\n" in out
  found = perfmodel.load_platform(path)
  known = perfmodel.builtin_platform("h100_node")
  assert found.device == known.device
  assert found.sources["to_host.rate"] == known.sources["to_host.rate"]
  assert found.axes[0].workers == 8
  # A share that its user did not know may be given later.
  status, _, _ = run(capsys, "bytes", model, f"--platform={path}", share)
  assert status == 0


def test_a_file_that_is_no_platform_is_named(capsys, tmp_path, model):
  path = tmp_path / "bad.json"
  place = f"`--platform` must be the JSON file of a platform, got '{path}': "
  path.write_text('{"name": "mine"}')
  status, _, err = run(capsys, "advise", model, f"--platform={path}")
  assert status == 1 and f"{place}`platform` must have a field 'device'" in err
  found = perfmodel.platform_to_dict(perfmodel.builtin_platform("h100_node"))
  path.write_text(json.dumps(found | {"name": 3}))
  status, _, err = run(capsys, "advise", model, f"--platform={path}")
  assert status == 1 and place in err and "`name` must be" in err


def test_an_interrupt_ends_a_command_with_one_line(capsys, monkeypatch):
  def interrupt():
    raise KeyboardInterrupt

  monkeypatch.setattr("jaxmotion.command.main", interrupt)
  assert __main__.main() == 130
  line = "\njaxmotion: Stopped by an interrupt.\n"
  assert capsys.readouterr() == ("", line)


def test_an_interrupt_while_jax_is_imported_ends_with_one_line(tmp_path):
  (tmp_path / "jax.py").write_text("raise KeyboardInterrupt\n")
  done = subprocess.run(
    [sys.executable, "-m", "jaxmotion", "--help"],
    capture_output=True,
    cwd=ROOT,
    env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    text=True,
  )
  assert done.returncode == 130
  assert done.stderr == "\njaxmotion: Stopped by an interrupt.\n"


TRACING = "tracing the loss and pricing what may be done: seconds to minutes"
# The first word is the command; {} is the file of the tasks.
WRONG_ARGUMENTS = [
  ("advise model", "`task` must be FILE.py:FUNCTION"),
  ("advise none.py:make", "`task` must name a file that exists"),
  ("advise {}:make_none", "`task` must name a function of"),
  ("advise {}:make_pair", "must return .* got a tuple of 2"),
  ("advise {}:make_error", "raises KeyError: 'nothing'"),
  (
    "advise {}:make_wrong_loss",
    r"raises TypeError: .*; `batch` is a tuple of float32\[2\]",
  ),
  ("advise {}:make_table", r"`params/table/0` must be .*, got int32\[2\]"),
  ("advise {}:make_vector", "must return one floating-point number"),
  ("advise {}:make_loss --platform=lan", "`--platform` must be one of .*json"),
  ("advise {}:make_loss --platform=no.json", "`--platform` .* exists.*no"),
  ("advise {}:make_loss --workers=0", r"`--workers` .* in \[1, 1048576\]"),
  ("advise {}:make_loss --peak_share=2", "`--peak_share` must"),
  (
    "advise {}:make_loss --peak_share=1e-99",
    r"`--peak_share` must be a number in \[0.001, 1\], got 1e-99",
  ),
  ("advise {}:make_loss --accuracy_budget=2", "`--accuracy_budget` must"),
  ("fit {}:make_loss --budget=much", "`--budget` must be bytes"),
  ("fit {}:make_small --budget=1KB", "`--budget` must be at least"),
  ("bytes {}:make_loss --codec=sign(", "SyntaxError: '\\(' was never closed$"),
  ("bytes {}:make_loss --codec=topk(density=0)", "`--codec`: .*density"),
  ("bytes {}:make_loss --codec=3", "`--codec` must make a codec"),
  (
    "bytes {}:make_loss --codec=feedback(uniforn(bits=4))",
    "`--codec` must be .*'uniforn' is none; did you mean 'uniform'",
  ),
  (
    "advise {}:make_loss --optimizer=adam",
    "must make an optimizer, got 'adam'",
  ),
  ("fit {}:make_loss --budget=1GB --optimizer=adamm(1)", "did you mean 'adam"),
  ("platform no/folder/lab.json", "`file` must be in a folder"),
  ("calibrate no/folder/lab.json", "`file` must be in a folder"),
  ("platform folder.json", "`file` must be one that can be written"),
  ("calibrate lab.txt", "`file` must end in .json"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_ARGUMENTS)
def test_wrong_arguments_are_one_line(
  capsys, tmp_path, monkeypatch, model, arguments, message
):
  (tmp_path / "folder.json").mkdir()
  monkeypatch.chdir(tmp_path)
  path = model.rpartition(":")[0]
  given = [text.replace("{}", path) for text in arguments.split()]
  status, out, err = run(capsys, *given)
  assert status == 1 and not out
  *progress, line = err.splitlines()
  assert not progress or progress == [TRACING]
  assert re.search(message, line)


def test_a_wrong_number_of_a_calibration_is_a_line_of_its_own(capsys, tmp_path):
  path = str(tmp_path / "here.json")
  for flag in ("workers", "largest", "sizes", "repeats"):
    status, out, err = run(capsys, "calibrate", path, f"--{flag}=0")
    assert status == 1 and not out
    assert err.splitlines()[-1].startswith(f"jaxmotion: `--{flag}` must be an")


@pytest.mark.parametrize("is_full", [False, True])
def test_an_output_that_cannot_be_written_ends_the_command(
  capsys, monkeypatch, model, is_full
):
  reader, writer = os.pipe()
  os.close(reader)
  place = "/dev/full" if is_full else writer
  # Closing fails if what was not written is still to be written.
  with open(place, "w") as stdout:
    monkeypatch.setattr(sys, "stdout", stdout)
    status = main(["bytes", model, "--codec=sign()"])
    monkeypatch.undo()
  if is_full:
    os.close(writer)
  line = "jaxmotion: stdout: No space left on device.\n"
  # A reader that has gone wants no word.
  expected = (1, line) if is_full else (141, "")
  progress, err = capsys.readouterr().err.split("\n", 1)
  assert progress == TRACING and (status, err) == expected


def test_help_names_the_platforms(capsys):
  with pytest.raises(SystemExit, match="0"):
    main(["advise", "--help"])
  said = " ".join(capsys.readouterr().out.split())
  with pytest.raises(ValueError) as refused:
    perfmodel.builtin_platform("none")
  names = re.findall(r"'(\w+)'", str(refused.value).partition(", got")[0])
  assert len(names) == 9 and f"{', '.join(names)}, or a JSON file" in said


def test_a_misspelt_flag_is_told_the_nearest_one(capsys, model):
  with pytest.raises(SystemExit, match="2"):
    main(["advise", model, "--platfrom=h100_node", "--zzz"])
  err = capsys.readouterr().err
  assert "usage: jaxmotion advise" in err
  assert "--platfrom=h100_node (did you mean --platform?), --zzz" in err


WRONG_ANSWERS = [
  ("tpu", "The device must be h200"),
  ("no.json", "no.json"),
  ("50", "(1 if unknown)` must be a number in [0.001, 1], got 50."),
  ("2.5", "`Number of hosts` must be an integer >= 1, got 2.5"),
  ("", "`Devices on each host` must be an integer >= 1, got ''"),
  ("-1", "(50 if unknown)` must be a number in (0, inf), got -1."),
  # Of nanoseconds, say. The rate is asked for again, too.
  ("3600", "`link.latency_s` must be a number in [0, 0.002], got 0.0036."),
]


def test_a_question_is_asked_again_until_it_is_answered(capsys, tmp_path):
  path = tmp_path / "lab.json"
  wrong = [answer for answer, _ in WRONG_ANSWERS]
  answers = ["lab", *wrong[:2], "cpu", wrong[2], "1", wrong[3], "2"]
  answers += [wrong[4], "1", "25", wrong[5], wrong[6], "25", "30"]
  status, _, err = run(capsys, "platform", str(path), answers=answers)
  assert status == 0, err
  found = perfmodel.load_platform(path)
  assert (found.name, found.axes[0].workers) == ("lab", 2)
  for line, (_, text) in zip(err.splitlines(), WRONG_ANSWERS, strict=True):
    assert text in line and line.endswith(" Answer again.")
  path.unlink()
  status, _, err = run(capsys, "platform", str(path), answers=answers[:-1])
  assert status == 1 and not path.exists()
  last = err.splitlines()[-1]
  assert last == "jaxmotion: The answers end before the questions."


def test_a_measured_device_gets_the_links_that_a_user_tells(
  capsys, tmp_path, model
):
  here, lab = str(tmp_path / "here.json"), str(tmp_path / "lab.json")
  small = ("--workers=1", "--largest=4096", "--sizes=2", "--repeats=1")
  status, out, err = run(capsys, "calibrate", here, *small)
  assert status == 0 and "round 1 of 1" in err
  assert "matmul, float32" in out and "without links" in out
  status, _, err = run(capsys, "bytes", model, f"--platform={here}")
  assert status == 1 and "must have links between workers" in err
  answers = ("lab", here, "4", "1", "25", "")
  status, out, _ = run(capsys, "platform", lab, answers=answers)
  assert status == 0
  assumed = "assumed: 50 us, as of ethernet_10gbit"
  assert f"axes.host.latency_s: {assumed}\n" in out
  found = perfmodel.load_platform(lab)
  assert found.axis("host").link.latency_s == 5e-5
  assert found.sources["axes.host.latency_s"] == assumed
  assert found.device == perfmodel.load_platform(here).device
  assert found.axis("host").link.rate == perfmodel.gbit_per_s(25)
  status, out, _ = run(capsys, "bytes", model, f"--platform={lab}")
  assert status == 0 and "4 workers of lab" in out
