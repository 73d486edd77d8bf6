"""Compares ours with every stock policy, on any model, in one run.

  JAX_PLATFORMS=cpu python -m experiments.residuals.compare \\
    --models=gpt,gpt_unrolled:layers=12,resnet50 --json=results/compare.jsonl
  JAX_PLATFORMS=cpu python -m experiments.residuals.compare \\
    --file=/path/my_model.py:make_loss --json=results/mine.jsonl

A file of yours has a function that returns `(loss_fn, params, batch)`: a
function (params, batch) -> loss, and trees of arrays or of shapes. `loss_fn` is
differentiated with respect to `params`. If the function has a parameter `wrap`,
it passes each block through it, and policies are compared around blocks, too:

  def make_loss(wrap=lambda block: block):
    block = wrap(lambda params, x: x + jax.nn.gelu(x @ params))
    def loss_fn(params, x):
      for own in params:
        x = block(own, x)
      return jnp.mean(x**2)
    like = jax.ShapeDtypeStruct
    params = [like((256, 256), "float32")] * 4
    return loss_fn, params, like((1024, 256), "float32")

Models of ours are those of `experiments.models.losses`, with options as in
`gpt:layers=12:batch=4`. Policies:
  plain               what JAX saves by itself;
  jax_block_...       `jax.checkpoint` around each block;
  jax_whole_...       `jax.checkpoint` around the loss;
    nothing           saves nothing,
    dots, no_batch    matmuls; those without batch dimensions,
    names, name_X, names_but_X  values named by `checkpoint_name`: all, X alone,
                      all but X;
  ours, ours_budget_X, ours_Xbits  `memory.compress_residuals` of the loss: by
                      default, with `memory_budget=X`, with X bits. Further
                      budgets have the FLOPs of stock policies that hold less;
  ours_flops_budget_X where these hold less still: with a `device` on which
                      FLOPs alone take time.

Every program is compiled for a GPU that need not be there (the extra
`cuda-compile`) and not run. Metrics are `temp_bytes` (between arguments and
results), `flops`, `step_ms_predicted`, `trace_s` and `compile_s` (seconds of
processors), each beside that of plain. With --json, rows are written as they
come. Rows of the same model, policy, sources and JAX that are there already are
not measured again, unless with --fresh.
"""

import fnmatch
import hashlib
import os
import pathlib
import time
from collections.abc import Iterator

from absl import flags

from experiments.common import list_flags, records, shared_flags
from experiments.common.console import JobError, make_console
from experiments.common.kept import read_cases
from experiments.models import losses
from experiments.residuals import (
  comparison,
  measure,
  model_names,
  user_file,
  verdicts,
)
from experiments.residuals.kept import add_ratios
from experiments.residuals.policies import (
  Policy,
  count_flops_alone,
  find_budget,
  list_policies,
)

_MODELS = list_flags.define_items(
  "models",
  list(losses.TASKS),
  model_names.check_model,
  "Models, NAME or NAME:OPTION=VALUE; all by default, none with --file.",
)
_FILE = list_flags.define_items(
  "file", [], str, "Models of yours, FILE.py:FUNCTION.", least=0
)
_POLICIES = list_flags.define_items(
  "policies", ["*"], str, "Patterns of policies, beside plain.", least=0
)
_TARGET = flags.DEFINE_enum(
  "target",
  "h100",
  list(measure.TARGETS),
  "Device to compile for.",
  allow_override=True,
)
_MATCH = flags.DEFINE_bool(
  "match",
  True,
  "Search budgets with the FLOPs of stock policies that hold less than ours.",
  allow_override=True,
)
_FRESH = flags.DEFINE_bool(
  "fresh", False, "Measure again what is in --json.", allow_override=True
)
_JSON = shared_flags.define_rows()
_PLOT = shared_flags.define_plot()


def main() -> None:
  """Compiles and predicts; prints tables, writes rows and a plot."""
  target, console = _TARGET.value, make_console()
  subjects = list(_list_subjects())
  if why := measure.explain_refusal(target):
    console.print(f"Nothing can be compiled for {target}: {why}.")
    return
  rows = compare_models(
    subjects,
    _POLICIES.value,
    target,
    _JSON.value,
    match=_MATCH.value,
    fresh=_FRESH.value,
  )
  console.print(verdicts.figures_table(rows).to_console())
  console.print(verdicts.losses_table(rows).to_console())
  console.print(verdicts.verdict_table(rows).to_console())
  if _PLOT.value:
    from experiments.residuals.frontier_plot import save_plot  # matplotlib.

    save_plot(rows, _PLOT.value)


def _list_subjects() -> Iterator[comparison.Subject]:
  """Yields the models of the flags."""
  if flags.FLAGS["models"].present or not _FILE.value:
    for text in _MODELS.value:
      yield comparison.Subject(text, losses.parse_task(text))
  for text in _FILE.value:
    make_task = user_file.load_task(text)
    path = pathlib.Path(text.rpartition(":")[0])
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    name = f"{path.stem}.{text.rpartition(':')[2]}"
    yield comparison.Subject(name, make_task, f"{path.name} {digest}")


def compare_models(
  subjects: list[comparison.Subject],
  patterns: list[str],
  target: str,
  path: str | os.PathLike[str] | None = None,
  *,
  match: bool = True,
  fresh: bool = False,
) -> list[records.Row]:
  """Returns the rows of models under policies, with ratios to plain."""
  run = _Run(target, path, fresh)
  policies = [list_policies(subject.make_task) for subject in subjects]
  _check_patterns(patterns, {p.name for found in policies for p in found})
  for subject, found in zip(subjects, policies, strict=True):
    chosen = [
      p
      for p in found
      if p.name == "plain"
      or any(fnmatch.fnmatch(p.name, pattern) for pattern in patterns)
    ]
    for i, policy in enumerate(chosen, 1):
      run.measure(subject, policy, f"{i} of {len(chosen)}")
    if match:
      run.match_stock(subject)
  return run.list_rows()


def _check_patterns(patterns: list[str], names: set[str]) -> None:
  """Raises if a pattern matches no policy of any model."""
  for pattern in patterns:
    if not fnmatch.filter(names, pattern):
      raise JobError(
        f"`--policies` must match a policy each, of {', '.join(sorted(names))},"
        f" got {pattern!r}."
      )


class _Run:
  """Rows of one run, some of them measured before.

  Args:
    target: device to compile for.
    path: file of rows, read before and written after every measurement.
    fresh: whether rows that are there already are measured again.
  """

  def __init__(
    self, target: str, path: str | os.PathLike[str] | None, fresh: bool
  ):
    self._target, self._path, self._fresh = target, path, fresh
    self._kept = read_cases(path)
    self._asked: dict[str, None] = {}

  def list_rows(self) -> list[records.Row]:
    """Returns the rows of what was asked for, in that order."""
    return _join({case: self._kept[case] for case in self._asked})

  def measure(
    self, subject: comparison.Subject, policy: Policy, place: str
  ) -> None:
    """Measures a model under a policy, unless its rows are there."""
    case = f"{subject.name}/{policy.name}"
    if case in self._asked:
      return
    self._asked[case] = None
    rows = [] if self._fresh else self._kept.get(case, [])
    name, target = policy.name, self._target
    known = comparison.find_current(subject, name, rows, target)
    if rows and len(known) == len(rows):
      print(f"{case} ({place}): in the file already", flush=True)
      return
    begin = time.monotonic()
    found = _try_policy(policy, target, known)
    figures = f"{_describe(found)}, in {time.monotonic() - begin:.0f} s"
    print(f"{case} ({place}): {figures}", flush=True)
    self._kept[case] = comparison.make_rows(
      subject, policy.name, found, self._target
    )
    if self._path is not None:
      records.write_rows(self._path, _join(self._kept))

  def match_stock(self, subject: comparison.Subject) -> None:
    """Measures the budgets whose FLOPs are those of stock policies."""
    # That is done for stock policies that hold less than ours at their FLOPs.
    # Ours are the fastest, and FLOPs are not all that takes time. So what is
    # left is searched again among those of the fewest FLOPs.
    task = subject.make_task()
    for device in (None, count_flops_alone(self._target)):
      for policy in self._find_losses(subject):
        # A budget for another policy may do.
        if policy not in self._find_losses(subject):
          continue
        most = (1 + verdicts.EQUAL_SHARE) * self._get_points(subject)[policy][
          "flops"
        ]
        try:
          found = find_budget(task, most, self._target, device)
        # What fails here has failed under every budget, and was reported.
        except Exception:
          continue
        if found is not None:
          self.measure(subject, found, f"at the FLOPs of {policy}")

  def _get_points(self, subject: comparison.Subject) -> verdicts.Points:
    return verdicts.group_points(self.list_rows()).get(subject.name, {})

  def _find_losses(self, subject: comparison.Subject) -> list[str]:
    """Returns the stock policies that hold less than ours at their FLOPs."""
    return [
      loss.policy for loss in verdicts.find_losses(self._get_points(subject))
    ]


def _join(kept: dict[str, list[records.Row]]) -> list[records.Row]:
  return add_ratios([row for rows in kept.values() for row in rows])


def _try_policy(
  policy: Policy, target: str, known: dict[str, float | str]
) -> comparison.Figures | str:
  """Measures a policy; what goes wrong is returned as text."""
  compiled = {metric: known.get(metric) for metric in comparison.COMPILED}
  try:
    if all(isinstance(value, float | int) for value in compiled.values()):
      found = comparison.Figures(flops=0, step_ms_predicted=0, **compiled)  # type: ignore[arg-type]
      return comparison.predict_again(policy, target, found)
    return comparison.measure_policy(policy, target)
  # Policies meet models of any kind; the others are to be measured still.
  except Exception as error:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _describe(found: comparison.Figures | str) -> str:
  if isinstance(found, str):
    return f"none: {found}"
  return (
    f"{found.temp_bytes / 2**20:,.0f} MiB, {found.flops / 1e12:.3f} TFLOP, step"
    f" {found.step_ms_predicted:.1f} ms, trace {found.trace_s:.1f} s, compile"
    f" {found.compile_s:.1f} s"
  )


if __name__ == "__main__":
  shared_flags.run_main(main)
