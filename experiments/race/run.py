"""Runs of the race: each trains one case on hosts with a link between them."""

import contextlib
import datetime
import importlib.util
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import rich.console

from experiments.common import records
from experiments.common.loop import OnStep
from experiments.common.progress import Display
from experiments.common.records import Measured, Metrics, Row
from experiments.hosts import links
from experiments.hosts.processes import REPLY_S, HostError, HostGroup
from experiments.race import cases, predict, rows as race_rows
from experiments.race.worker import Order
from experiments.train.decoder import Decoder, Shape

_STEP_S = 90.0  # At most, of the slowest case on the slowest link.
_TRIAL_SEED = 9

FACTORS = (1 / 3, 1.0, 3.0)
"""Factors of the base rate in trials."""


class Setting(NamedTuple):
  """Links, cases and model of a race."""

  links: Sequence[str] = tuple(cases.LINKS)
  cases: Sequence[str] = cases.CASES
  seeds: int = 1  # Number of runs of each case.
  steps: int = 192
  every: int = 16  # Steps between two evaluations.
  trial_steps: int = 40
  shape: Shape = Shape()


QUICK = Setting(
  links=("100mbit",),
  cases=(
    *("none", "fp32", "int8", "int4_feedback", "diloco"),
    *("torch_fp32", "torch_fp16"),
  ),
  steps=120,
  every=8,
  trial_steps=24,
  shape=Shape(layers=2, channels=256, heads=4, length=64, batch=16),
)
"""Setting of a few minutes: few cases of a small model on one link."""


class Job(NamedTuple):
  """One run: what is trained, and over which link."""

  link: str  # Name of the link; "trial" has none.
  order: Order

  @property
  def name(self) -> str:
    """Name of the run in rows."""
    order = self.order
    last = f"{order.rate:.3g}" if self.link == "trial" else order.seed
    return f"{self.link}/{order.case}/{order.steps}/{last}"


def list_trials(setting: Setting) -> list[Job]:
  """Returns short runs of every case, equally many with the same rates."""
  return [
    Job(
      race_rows.TRIAL,
      Order(case, _TRIAL_SEED, setting.trial_steps, cases.BASE_RATE * factor),
    )
    for case in setting.cases
    for factor in FACTORS
  ]


def list_races(setting: Setting, rows: Sequence[Row]) -> list[Job]:
  """Returns the runs of all links and seeds, at the best rates of trials."""
  # Seeds are outside, so that a slow hour of the machine falls on all cases.
  rates = race_rows.best_rates(rows)
  return [
    Job(
      link,
      Order(case, seed, setting.steps, rates.get(case, cases.BASE_RATE)),
    )
    for link in setting.links
    for seed in range(setting.seeds)
    for case in setting.cases
  ]


def run_jobs(
  jobs: Sequence[Job],
  setting: Setting,
  kept: dict[str, list[Row]],
  path: str | None,
  console: rich.console.Console,
) -> list[Row]:
  """Runs the jobs whose rows are not kept; writes rows after each."""
  todo = [job for job in jobs if job.name not in kept]
  ours = [job for job in todo if not cases.is_peer(job.order.case)]
  if len(ours) < len(todo) and importlib.util.find_spec("torch") is None:
    console.print("PyTorch is not installed (extra `peers`): not measured.")
    todo = ours
  decoder = Decoder(setting.shape)
  machine = records.describe_run("emulated links")
  steps = todo[0].order.steps if todo else 1
  with Display(console, steps=steps, runs=len(todo)) as display:
    for link, group in itertools.groupby(todo, lambda job: job.link):
      with _open_hosts(link) as hosts:
        for job in group:
          shown = f"{link} {job.order.case}", job.order.seed
          on_step = display.begin_run(*shown)
          try:
            metrics = measure_run(hosts, job, setting.every, decoder, on_step)
          except HostError as error:
            console.print(f"{job.name}: not measured, {error}")
            continue
          kept[job.name] = records.make_rows(
            "race", {job.name: metrics}, machine=machine
          )
          records.write_rows(path, itertools.chain(*kept.values()))
          loss = metrics["loss"].value
          score = math.nan if loss == race_rows.DIVERGED else loss
          display.end_run(*shown, score, metrics["step_ms"].value)
  return [row for own in kept.values() for row in own]


def measure_run(
  hosts: Sequence[links.Host],
  job: Job,
  every: int,
  decoder: Decoder,
  on_step: OnStep,
) -> Metrics:
  """Trains a case from its start; evaluations are not in its time."""
  order = job.order
  language = "torch" if cases.is_peer(order.case) else "jax"
  module = f"experiments.race.{language}_worker"
  if cases.is_alone(order.case):
    hosts = links.loopback_hosts(1)
  shape = json.dumps(decoder.shape._asdict())
  with HostGroup(list(hosts), module, [f"--shape={shape}"]) as group:
    facts = group.ask({"do": "start", "order": order._asdict()})[0]

    def evaluate() -> float:
      replies = group.ask({"do": "evaluate"})
      return statistics.fmean(reply["loss"] for reply in replies)

    curve = [race_rows.Point(0, 0.0, evaluate())]
    sent = packets = 0.0
    finite = True
    while finite and curve[-1].steps < order.steps:
      done, minutes, _ = curve[-1]
      count = min(every, order.steps - done)
      replies = group.ask(
        {"do": "train", "steps": count}, REPLY_S + count * _STEP_S
      )
      minutes += max(reply["seconds"] for reply in replies) / 60
      sent += statistics.fmean(reply["bytes"] for reply in replies)
      packets += statistics.fmean(reply["packets"] for reply in replies)
      finite = all(reply["finite"] for reply in replies)
      loss = evaluate()
      curve.append(race_rows.Point(done + count, minutes, loss))
      on_step(done + count, loss)
  done, minutes, loss = curve[-1]
  found = {
    "loss": Measured(loss if finite else race_rows.DIVERGED, "nats/byte"),
    "minutes": Measured(minutes, "min"),
    "step_ms": Measured(60e3 * minutes / done, "ms"),
    "curve": Measured(race_rows.write_curve(curve), "steps min nats/byte"),
    "rate": Measured(order.rate, "1"),
    "setting": Measured(describe_job(job, decoder), "text"),
    "date": Measured(f"{datetime.date.today()}", "text"),
  }
  if cases.is_alone(order.case) or job.link == race_rows.TRIAL:
    return found
  exchange_s = predict.exchange_seconds(
    order.case, facts, decoder.network.params, cases.LINKS[job.link]
  )
  headers = links.HEADER_BYTES * packets
  found |= {
    "interface_bytes": Measured(sent / done, "bytes"),
    "wire_bytes_counted": Measured((sent - headers) / done, "bytes"),
    "exchange_ms_predicted": Measured(1e3 * exchange_s, "ms"),
  }
  if "wire_bytes_predicted" in facts:
    predicted = facts["wire_bytes_predicted"]
    found["wire_bytes_predicted"] = Measured(predicted, "bytes")
  return found


def describe_job(job: Job, decoder: Decoder) -> str:
  """Returns what two runs that are compared must have in common."""
  return f"{decoder.describe()}; {job.order.steps} steps"


@contextlib.contextmanager
def _open_hosts(link: str) -> Iterator[Sequence[links.Host]]:
  """Makes two hosts with a link of this name; trials have none."""
  if link == race_rows.TRIAL:
    yield links.loopback_hosts(2)
    return
  rate, rtt_ms = cases.LINKS[link]
  with links.linked_hosts(2, rate, rtt_ms / 2) as hosts:
    yield hosts
