r"""Trains networks whose residuals are compressed, beside plain training.

  python -m experiments.residuals.accuracy \
    --json=docs/results/residuals_accuracy.jsonl

Each case trains from the same parameters on the same batches: `fp32` plainly,
`lossless` with the minimum cut, `int8` and `int4` with it in blocks of 8 and 4
bits (stochastic rounding). Says how far the first step's gradient is from the
plain one, and the accuracy on held-out images after training, of several seeds.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.table
from absl import flags

from experiments import models
from experiments.activations.sampling import (
  WIDTHS,
  load,
  make_optimizer,
  to_batch,
)
from experiments.common import records, shared_flags
from experiments.common.console import make_console
from experiments.common.progress import Display
from experiments.data.images import batch_indices
from jaxmotion import codecs
from jaxmotion.core import Array, PyTree
from jaxmotion.memory import compress_residuals

CODECS = {
  "fp32": None,
  "lossless": None,
  "int8": codecs.uniform(bits=8, block=128, rounding="stochastic"),
  "int4": codecs.uniform(bits=4, block=64, rounding="stochastic"),
}
_OPTIONS: dict[str, dict] = {
  "resnet": {"blocks": (1, 2, 2, 1), "width": 0.125},
  "alexnet": {"width": WIDTHS["alexnet"]},
  "vgg16": {"width": WIDTHS["vgg16"]},
}

_NETS = flags.DEFINE_list(
  "nets", list(_OPTIONS), "Names of networks.", allow_override=True
)
_STEPS = flags.DEFINE_integer("steps", 150, "Of training.", allow_override=True)
_BATCH = flags.DEFINE_integer(
  "batch", 32, "Images of a step.", 1, allow_override=True
)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs.", 1, allow_override=True)
_IMAGE = flags.DEFINE_integer(
  "image", 32, "Pixels of a side.", 32, allow_override=True
)
_JSON = shared_flags.define_rows()


class Result(NamedTuple):
  """What one network came to.

  Attributes:
    net: its name.
    case: how its residuals were kept.
    accuracy: per cent of held-out images, of each seed.
    error: relative error of the first gradient, of each seed.
  """

  net: str
  case: str
  accuracy: list[float]
  error: list[float]


def run(
  net_name: str,
  case: str,
  *,
  steps: int,
  batch: int,
  seeds: int,
  image: int,
  display: Display,
) -> Result:
  """Trains a network once for each seed.

  Args:
    net_name: key of the networks that are trained here.
    case: key of `CODECS`.
    steps: of training.
    batch: images of a step.
    seeds: how many runs.
    image: pixels of a side.
    display: where to show progress.

  Raises:
    ValueError: there is no such network.
  """
  if net_name not in _OPTIONS:
    raise ValueError(
      f"`nets` must be some of {', '.join(_OPTIONS)}, got {net_name!r}."
    )
  net = models.make_network(
    net_name, image=image, classes=10, **_OPTIONS[net_name]
  )
  images = load("digits", image)
  plain = jax.jit(jax.value_and_grad(net.loss))
  grad = plain if case == "fp32" else _compressed(net, CODECS[case])
  test = jax.jit(lambda params, x: net.apply(params, x).argmax(-1))
  optimizer = make_optimizer(steps)

  @jax.jit
  def update(
    grads: PyTree, state: PyTree, params: PyTree
  ) -> tuple[PyTree, PyTree]:
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  result = Result(net_name, case, [], [])
  for seed in range(seeds):
    params = jax.jit(net.init)(jax.random.key(seed))
    state = optimizer.init(params)
    on_step = display.begin_run(f"{net_name} {case}", seed)
    began = time.perf_counter()
    for step in range(steps):
      chosen = batch_indices(len(images.train.labels), batch, seed, step)
      given = to_batch(images.train, chosen)
      loss, grads = grad(params, given)
      if step == 0:
        exact = plain(params, given)[1]
        result.error.append(_distance(exact, grads))
      params, state = update(grads, state, params)
      on_step(step + 1, float(loss))
    hits = total = 0
    for start in range(0, len(images.test.labels) - batch + 1, batch):
      x, labels = to_batch(images.test, np.arange(start, start + batch))
      hits += int((test(params, x) == labels).sum())
      total += batch
    result.accuracy.append(100 * hits / total)
    took_ms = 1e3 * (time.perf_counter() - began) / steps
    display.end_run(f"{net_name} {case}", seed, result.accuracy[-1], took_ms)
  return result


def _compressed(net: models.Network, codec: codecs.Codec | None) -> Callable:
  def loss(params: PyTree, batch: tuple[Array, Array]) -> Array:
    return net.loss(params, batch)

  return jax.jit(jax.value_and_grad(compress_residuals(loss, codec)))


def _distance(exact: PyTree, found: PyTree) -> float:
  """Relative, of all gradients together."""
  gap = jax.tree.map(jnp.subtract, exact, found)
  return float(optax.tree.norm(gap) / optax.tree.norm(exact))


def rows(results: Sequence[Result]) -> list[records.Row]:
  """Makes rows: a mean over seeds, its deviation, and the plain one's mean."""
  baseline = {r.net: np.mean(r.accuracy) for r in results if r.case == "fp32"}
  made = []
  for r in results:
    for metric, values, unit in (
      ("test_accuracy", r.accuracy, "%"),
      ("gradient_error", r.error, "1"),
    ):
      mean = float(np.mean(values))
      base = baseline.get(r.net) if metric == "test_accuracy" else None
      made.append(
        records.Row(
          f"residuals_accuracy_{r.net}",
          r.case,
          metric,
          mean,
          unit,
          None if base is None else float(base),
          None if base is None else mean / float(base),
          float(np.std(values, ddof=1)) if len(values) > 1 else None,
          records.describe_machine(),
          jax.__version__,
        )
      )
  return made


def table(made: Sequence[records.Row]) -> rich.table.Table:
  """Shows accuracies, their distance from plain training, and errors."""
  shown = rich.table.Table(title="Training with compressed residuals")
  for column in ("network", "case"):
    shown.add_column(column)
  for column in ("accuracy %", "points", "gradient error"):
    shown.add_column(column, justify="right")
  error = {
    (r.experiment, r.case): r.value
    for r in made
    if r.metric == "gradient_error"
  }
  for r in made:
    if r.metric == "test_accuracy":
      gap = None if r.baseline is None else float(r.value) - r.baseline
      shown.add_row(
        r.experiment.removeprefix("residuals_accuracy_"),
        r.case,
        f"{float(r.value):.2f}",
        "" if gap is None else f"{gap:+z.2f}",
        f"{float(error[r.experiment, r.case]):.2g}",
      )
  return shown


def main() -> None:
  """Runs what the flags say."""
  console = make_console()
  results = []
  runs = len(_NETS.value) * len(CODECS) * _SEEDS.value
  with Display(console, steps=_STEPS.value, runs=runs) as display:
    for name in _NETS.value:
      for case in CODECS:
        results.append(
          run(
            name,
            case,
            steps=_STEPS.value,
            batch=_BATCH.value,
            seeds=_SEEDS.value,
            image=_IMAGE.value,
            display=display,
          )
        )
  made = rows(results)
  console.print(table(made))
  if _JSON.value:
    records.write_rows(_JSON.value, made)


if __name__ == "__main__":
  shared_flags.run_main(main)
