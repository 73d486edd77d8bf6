import contextlib
import re

import pytest

from experiments.common import records
from experiments.common.console import JobError
from experiments.hosts import links
from experiments.race import (
  __main__ as race_main,
  cases,
  predict,
  rows as race_rows,
  run,
)
from experiments.race.run import QUICK, Setting, list_races, list_trials
from experiments.tables import render_markdown
from experiments.train.decoder import Decoder, Shape
from tests.paths import ROOT
from tests.processes import environment

SHAPE = "layers=1,channels=16,heads=2,length=8,batch=4,held_out=4"
SMALL = {"quick": True, "steps": 8, "eval_every": 8, "shape": SHAPE.split(",")}


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
  """Puts loopback in the place of links, and shares compiled programs."""
  for name, value in environment().items():
    monkeypatch.setenv(name, value)
  hosts = lambda count, *_: contextlib.nullcontext(links.loopback_hosts(count))
  monkeypatch.setattr(links, "linked_hosts", hosts)
  monkeypatch.setattr(links, "explain_refusal", lambda: None)
  monkeypatch.setattr(race_main.signals, "exit_on_sigterm", lambda: None)


def test_a_stopped_race_goes_on_and_all_cases_train_one_model(
  run_main, monkeypatch
):
  monkeypatch.setattr(run, "FACTORS", (3.0,))
  trials, said = run_main(race_main.main, trials=True, cases=["none"], **SMALL)
  assert "Loss of trials" in said
  assert {row.case for row in trials} == {"trial/none/8/0.003"}
  first, _ = run_main(race_main.main, cases=["none", "fp32"], **SMALL)
  both = ["none", "fp32", "diloco"]
  rows, said = run_main(race_main.main, cases=both, plot=True, **SMALL)
  assert rows[: len(first)] == first, "it was trained again"
  assert "100mbit diloco" in said
  found = {(row.case, row.metric): row for row in rows}
  assert found["100mbit/none/8/0", "rate"].value == 0.003
  assert found["100mbit/fp32/8/0", "rate"].value == cases.BASE_RATE

  table = render_markdown(rows)
  assert table.count("\n") == 2 + len(both) - 1
  sent = found["100mbit/fp32/8/0", "wire_bytes_predicted"].value
  assert sent == 4 * Decoder(read_shape()).network.size
  assert found["100mbit/diloco/8/0", "wire_bytes_predicted"].value < sent / 32
  # Hosts begin with the same parameters and share a batch.
  curve = found["100mbit/fp32/8/0", "curve"].value.split("; ")
  assert len(curve) == 2
  starts = {
    found[f"100mbit/{case}/8/0", "curve"].value.split("; ")[0] for case in both
  }
  assert len(starts) == 1

  _, said = run_main(race_main.main, advise=True, **SMALL)
  assert (
    len(re.findall(r"100mbit.*(?:fp32|diloco).*(?:fp32|diloco)", said)) == 1
  )

  with pytest.raises(JobError, match="Use another file, or --fresh"):
    other = [*SMALL["shape"][:-1], "held_out=2"]
    run_main(race_main.main, cases=["none"], **(SMALL | {"shape": other}))


@pytest.mark.slow
def test_the_advice_of_the_page_is_that_for_its_rows():
  decoder = Decoder(Setting().shape)
  rows = records.read_rows(ROOT / "docs" / "results" / "race.jsonl")
  advise = lambda link, alone_s: predict.advise_steps(
    cases.LINKS[link], decoder, alone_s
  )
  table = race_rows.advice_table(rows, advise).to_markdown()
  page = (ROOT / "docs" / "benchmarks" / "race.md").read_text()
  assert table.count("\n") > 3 and table in page


def read_shape():
  pairs = (text.split("=") for text in SMALL["shape"])
  return Shape(**{name: int(value) for name, value in pairs})


def test_peers_train_the_same_model(run_main):
  pytest.importorskip("torch")
  # Two periods of post-local SGD, of which the first averages gradients.
  chosen = ["torch_none", "torch_fp32", "torch_post_local", "none"]
  rows, _ = run_main(race_main.main, cases=chosen, **(SMALL | {"steps": 16}))
  found = {(row.case, row.metric): row.value for row in rows}
  one = found["100mbit/none/16/0", "curve"].split("; ")
  for case in ("torch_none", "torch_fp32", "torch_post_local"):
    curve = found[f"100mbit/{case}/16/0", "curve"].split("; ")
    for steps, (a, b) in enumerate(zip(one, curve, strict=True)):
      if case == "torch_post_local" and steps == 2:
        continue
      assert float(a.split()[2]) == pytest.approx(float(b.split()[2]), abs=2e-3)


def test_evaluations_fall_on_exchanges(run_main):
  with pytest.raises(JobError, match="must be a multiple of 8, got 12"):
    run_main(race_main.main, cases=["none"], **(SMALL | {"eval_every": 12}))


def test_all_cases_have_equally_many_trials():
  trials = [job.order.case for job in list_trials(Setting())]
  assert {trials.count(case) for case in cases.CASES} == {3}
  names = [job.name for job in list_races(Setting(seeds=2), [])]
  assert len(set(names)) == len(names) == 2 * 3 * len(cases.CASES)
  assert set(QUICK.cases) <= set(cases.CASES)


def test_the_predicted_sum_takes_its_bytes_and_two_round_trips():
  link = cases.Link("20mbit", 50.0)
  payload = 43e6
  facts = {"moves": [["all_reduce", payload, 1]], "share": 4}
  seconds = predict.exchange_seconds("sharded_fp32", facts, {}, link)
  least = 8 * payload / 20e6 + 2 * 0.05
  assert 1 < 4 * seconds / least < 1.06
  # Sums of one round wait for one another once; those of two rounds twice.
  apart = facts | {"moves": [["all_reduce", payload / 8, 8]]}
  assert seconds == predict.exchange_seconds("sharded_fp32", apart, {}, link)
  twice = predict.exchange_seconds("power_sgd", facts, {}, link)
  assert 4 * (twice - seconds) == pytest.approx(2 * 0.05, rel=0.01)
  # Codecs that were calibrated take time.
  params = Decoder(read_shape()).network.params
  whole = predict.exchange_seconds("int4_feedback", facts, params, link)
  assert whole > seconds
  assert whole == predict.exchange_seconds(
    "delayed_int4_feedback", facts, params, link
  )


def test_bytes_of_peers_follow_from_the_shapes():
  params = Decoder(read_shape()).network.params
  whole = cases.peer_bytes("torch_fp32", params, 16)
  assert whole == 4 * Decoder(read_shape()).network.size
  assert cases.peer_bytes("torch_fp16", params, 16) == whole / 2
  # Eight steps of gradients, and parameters once.
  local = cases.peer_bytes("torch_post_local", params, 16)
  assert local == whole * 9 / 16
  assert whole / 16 < cases.peer_bytes("torch_powersgd4", params, 16) < whole
