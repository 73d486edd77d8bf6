"""Trains networks and measures their activations under every code."""

from collections.abc import Sequence

import rich.console

from experiments import models
from experiments.activations import measure, sampling
from experiments.common import progress
from experiments.models import training


def check_steps(steps: Sequence[int]) -> None:
  """Raises unless steps ascend, and a schedule can end at the last."""
  # The learning rate rises for a step, and falls for another.
  if list(steps) != sorted(set(steps)) or steps[-1] < 2:
    got = ", ".join(map(str, steps))
    raise ValueError(f"must ascend to 2 or more, got {got}.")


def measure_networks(
  nets: Sequence[str],
  *,
  data: str,
  image: int,
  steps: Sequence[int],
  batch: int,
  seed: int,
  console: rich.console.Console,
) -> list[measure.Measured]:
  """Trains networks and measures their activations several times on the way."""
  images = training.load_color_images(data, image)
  measured = []
  with progress.Display(console, steps=steps[-1], runs=len(nets)) as display:
    for name in nets:
      net = models.make_network(
        name,
        image=image,
        classes=images.classes,
        width=training.NARROW_WIDTHS[name],
      )

      def on_snapshot(snapshot: sampling.Snapshot, name: str = name) -> None:
        measured.append(measure.measure_snapshot(name, snapshot))
        if snapshot.step == steps[-1]:
          layer, payload_bytes = measure.check_largest(snapshot)
          console.print(f"{name}: {layer} really takes {payload_bytes:,} bytes")

      step_ms = sampling.train_network(
        net,
        images,
        steps=steps,
        batch=batch,
        seed=seed,
        on_snapshot=on_snapshot,
        on_step=display.begin_run(name, seed),
      )
      display.end_run(name, seed, measured[-1].accuracy, step_ms)
  return measured
