r"""Trains networks whose residuals are compressed, beside plain training.

  python -m experiments.residuals.accuracy \
    --json=docs/results/residuals_accuracy.jsonl

Each case trains from the same parameters on the same batches: `fp32` plainly,
`lossless` with the minimum cut, `int8` and `int4` with the cut in blocks of 8
and 4 bits (stochastic rounding). The table has the relative error of the first
gradient, and the accuracy on held-out images after training, over the seeds.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from experiments import models
from experiments.common import (
  list_flags,
  loop,
  progress,
  records,
  shared_flags,
)
from experiments.common.console import make_console
from experiments.models import training
from experiments.residuals import tables
from jaxmotion import codecs, memory
from jaxmotion.core import Array, PyTree

CODECS = {
  "fp32": None,
  "lossless": None,
  "int8": codecs.uniform(bits=8, block=128, rounding="stochastic"),
  "int4": codecs.uniform(bits=4, block=64, rounding="stochastic"),
}
"""Codec of the residuals, by case; `fp32` is plain training."""

NETWORKS: dict[str, dict] = {
  "resnet": {"blocks": (1, 2, 2, 1), "width": 0.125},
  "alexnet": {"width": training.NARROW_WIDTHS["alexnet"]},
  "vgg16": {"width": training.NARROW_WIDTHS["vgg16"]},
}
"""Options of the networks that are trained, by name."""


class Result(NamedTuple):
  """Accuracies and gradient errors of one network in one case."""

  net: str  # Name of the network.
  case: str  # Name of the case, a key of `CODECS`.
  # Correctly classified held-out images in per cent, by seed.
  accuracy: list[float]
  error: list[float]  # Relative error of the first gradient, by seed.


def train_network(
  net_name: str,
  case: str,
  *,
  steps: int,
  batch: int,
  seeds: int,
  image: int,
  display: progress.Display,
) -> Result:
  """Trains a network once for each seed, from the same start in each case."""
  net = models.make_network(
    net_name, image=image, classes=10, **NETWORKS[net_name]
  )
  images = training.load_color_images("digits", image)
  plain = jax.jit(jax.value_and_grad(net.loss))
  grad = plain
  if case != "fp32":
    loss_fn = memory.compress_residuals(
      lambda params, batch: net.loss(params, batch), CODECS[case]
    )
    grad = jax.jit(jax.value_and_grad(loss_fn))
  predict = jax.jit(lambda params, x: net.apply(params, x).argmax(-1))
  optimizer = training.make_optimizer(steps)

  @jax.jit
  def update(
    grads: PyTree, state: PyTree, params: PyTree
  ) -> tuple[PyTree, PyTree]:
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  def step(
    state: tuple[PyTree, PyTree], batch: tuple[Array, Array]
  ) -> tuple[tuple[PyTree, PyTree], float]:
    params, opt_state = state
    loss, grads = grad(params, batch)
    return update(grads, opt_state, params), float(loss)

  result = Result(net_name, case, [], [])
  for seed in range(seeds):
    params = jax.jit(net.init)(jax.random.key(seed))
    load_batch = training.make_batches(images.train, batch, seed)
    first = load_batch(0)
    exact, found = plain(params, first)[1], grad(params, first)[1]
    result.error.append(float(_relative_distance(exact, found)))
    (params, _), log = loop.run_steps(
      (params, jax.jit(optimizer.init)(params)),
      step,
      load_batch,
      steps=steps,
      checkpoint_every=steps,
      on_step=display.begin_run(f"{net_name} {case}", seed),
    )
    hits = total = 0
    for start in range(0, len(images.test.labels) - batch + 1, batch):
      x, labels = training.select_batch(
        images.test, np.arange(start, start + batch)
      )
      hits += int((predict(params, x) == labels).sum())
      total += batch
    result.accuracy.append(100 * hits / total)
    step_ms = sum(log.step_ms) / steps
    display.end_run(f"{net_name} {case}", seed, result.accuracy[-1], step_ms)
  return result


def _relative_distance(exact: PyTree, found: PyTree) -> Array:
  """Returns the norm of all differences over the norm of `exact`."""
  gap = jax.tree.map(jnp.subtract, exact, found)
  return optax.tree.norm(gap) / optax.tree.norm(exact)


def make_rows(results: Sequence[Result]) -> list[records.Row]:
  """Returns means over seeds, with deviations and plain training's accuracy."""
  groups: dict[str, dict[str, records.Metrics]] = {}
  for r in results:
    groups.setdefault(r.net, {})[r.case] = {
      "test_accuracy": records.average_repeats(r.accuracy, "%"),
      "gradient_error": records.average_repeats(r.error, "1"),
    }
  rows = []
  for net, cases in groups.items():
    plain = cases.get("fp32", {}).items()
    base = {name: found for name, found in plain if name == "test_accuracy"}
    rows += records.make_rows(f"residuals_accuracy_{net}", cases, base)
  return rows


_NETS = list_flags.define_names(
  "nets", NETWORKS, NETWORKS, "Names of networks."
)
_STEPS = flags.DEFINE_integer(
  "steps", 150, "Number of training steps.", 2, allow_override=True
)
_BATCH = flags.DEFINE_integer(
  "batch", 32, "Images in a batch.", 1, allow_override=True
)
_SEEDS = flags.DEFINE_integer(
  "seeds", 3, "Number of runs of each case.", 1, allow_override=True
)
_IMAGE = flags.DEFINE_integer(
  "image", 32, "Height and width of the images.", 32, allow_override=True
)
_JSON = shared_flags.define_rows()


def main() -> None:
  """Trains every network in every case, prints the table and writes rows."""
  runs = len(_NETS.value) * len(CODECS) * _SEEDS.value
  console = make_console()
  with progress.Display(console, steps=_STEPS.value, runs=runs) as display:
    results = [
      train_network(
        name,
        case,
        steps=_STEPS.value,
        batch=_BATCH.value,
        seeds=_SEEDS.value,
        image=_IMAGE.value,
        display=display,
      )
      for name in _NETS.value
      for case in CODECS
    ]
  rows = make_rows(results)
  console.print(tables.accuracy_table(rows).to_console())
  records.write_rows(_JSON.value, rows)


if __name__ == "__main__":
  shared_flags.run_main(main)
