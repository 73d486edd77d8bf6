"""Trains a transformer over limited links by each exchange, to the same loss.

  python -m experiments.race --trials --json=results/race.jsonl
  python -m experiments.race --json=results/race.jsonl --plot=results/race.png

Hosts are two network namespaces of this machine that share its cores, with a
link between them. Each case trains the same decoder on the same bytes of text,
with the same initial parameters and batches, in JAX or in PyTorch. `none` and
`torch_none` are one host that computes all samples. The result is the loss of
held-out text over the minutes that training took. Evaluations are not counted.

`--trials` gives every case equally many short runs, whose best learning rates
the race takes from the same file of rows. Rows are written after every run, and
the same `--json` goes on where a stopped job has ended. `--quick` is a race of
minutes: few cases of a small model on one link. `--advise` trains nothing: it
compares what `planner.advise` names with the rows of `--json`. The race needs
root, or a kernel that gives users namespaces of their own.
"""

import sys

from absl import flags

from experiments.common import list_flags, names, records, shared_flags, signals
from experiments.common.console import JobError, make_console
from experiments.hosts import links
from experiments.race import cases, predict, rows as race_rows, run
from experiments.train.decoder import Decoder, Shape

_QUICK = flags.DEFINE_bool("quick", False, "A race of few minutes.")
_TRIALS = flags.DEFINE_bool("trials", False, "Try learning rates, no links.")
_ADVISE = flags.DEFINE_bool("advise", False, "Compare advice with --json.")
_LINKS = list_flags.define_names(
  "links", (), cases.LINKS, "Links; all, or that of --quick.", least=0
)
_CASES = list_flags.define_names(
  "cases", (), cases.CASES, "Cases; all, or those of --quick.", least=0
)
_SEEDS = flags.DEFINE_integer(
  "seeds", 1, "Number of runs of each case.", 1, allow_override=True
)
_STEPS = flags.DEFINE_integer(
  "steps",
  None,
  "Steps of a run, or of a trial.",
  cases.EVERY,
  allow_override=True,
)
_EVERY = flags.DEFINE_integer(
  "eval_every", None, "Steps between evaluations.", 1, allow_override=True
)


def _check_size(text: str) -> str:
  """Returns an item that changes a size of the model."""
  names.parse_options([text], Shape._fields, "--shape")
  return text


_SHAPE = list_flags.define_items(
  "shape",
  (),
  _check_size,
  "Sizes to change, as in layers=2,channels=256.",
  least=0,
)
_JSON = shared_flags.define_rows()
_PLOT = shared_flags.define_plot()
_FRESH = shared_flags.define_fresh()


def main() -> None:
  """Runs trials or the race, prints the table, writes rows and plot."""
  setting = _read_setting()
  console = make_console()
  needs_links = not (_TRIALS.value or _ADVISE.value)
  if needs_links and (why := links.explain_refusal()):
    links.enter_user_namespace([sys.executable, *sys.orig_argv[1:]])
    raise JobError(f"Limited links cannot be made here: {why}.")
  # Namespaces are removed when their context is left, so SIGTERM must leave it.
  signals.exit_on_sigterm()
  kept = {} if _FRESH.value else records.read_cases(_JSON.value)
  known = [row for own in kept.values() for row in own]
  decoder = Decoder(setting.shape)
  if _ADVISE.value:
    advise = lambda link, alone_s: predict.advise_steps(
      cases.LINKS[link], decoder, alone_s
    )
    console.print(race_rows.advice_table(known, advise).to_console())
    return
  if _TRIALS.value:
    jobs = run.list_trials(setting)
  else:
    jobs = run.list_races(setting, known)
  for job in jobs:
    wanted = run.describe_job(job, decoder)
    for row in kept.get(job.name, ()):
      if row.metric == "setting" and row.value != wanted:
        raise JobError(
          f"`--json` must hold runs of the same setting, {wanted}, got"
          f" {row.value}, of {job.name}. Use another file, or --fresh."
        )
  rows = run.run_jobs(jobs, setting, kept, _JSON.value, console)
  if _TRIALS.value:
    console.print(race_rows.trial_table(rows).to_console())
    return
  console.print(race_rows.summary_table(rows).to_console())
  gains = race_rows.gain_table(rows)
  if gains.lines:
    console.print(gains.to_console())
  if _PLOT.value:
    from experiments.race.plot import save_plot  # Imports matplotlib.

    save_plot(rows, _PLOT.value)


def _read_setting() -> run.Setting:
  """Returns the setting that the flags change."""
  base = run.QUICK if _QUICK.value else run.Setting()
  sizes = names.parse_options(_SHAPE.value, base.shape._fields, "--shape")
  steps = _STEPS.value
  setting = base._replace(
    links=_LINKS.value or base.links,
    cases=_CASES.value or base.cases,
    seeds=_SEEDS.value,
    steps=steps or base.steps,
    trial_steps=steps or base.trial_steps,
    every=_EVERY.value or base.every,
    shape=base.shape._replace(**{k: int(v) for k, v in sizes.items()}),
  )
  if setting.every % cases.EVERY:
    # Hosts that train apart have the same parameters then.
    raise JobError(
      f"`--eval_every` must be a multiple of {cases.EVERY}, got"
      f" {setting.every}."
    )
  return setting


if __name__ == "__main__":
  shared_flags.run_main(main)
