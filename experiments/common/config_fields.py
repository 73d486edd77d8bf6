"""Checks of the fields that configurations of several runners have."""

from ml_collections import ConfigDict

from experiments.common import console

_COUNTS = (
  "steps",
  "batch_size",
  "workers",
  "checkpoint_every",
  "eval_every",
  "budget_every",
)


def check_fields(config: ConfigDict, cases: str) -> None:
  """Raises unless a job of a configuration has something to do."""
  for name in _COUNTS:
    if name in config and config[name] < 1:
      raise console.JobError(
        f"`config.{name}` must be an integer >= 1, got {config[name]}."
      )
  for name in (cases, "seeds"):
    found = tuple(getattr(config, name))
    if not found or len(set(found)) < len(found):
      raise console.JobError(
        f"`config.{name}` must have one item or more, each once, got {found}."
      )
  workers = config.get("workers", 1)
  if config.batch_size % workers:
    raise console.JobError(
      f"`config.batch_size` must be a multiple of the {workers} workers, got"
      f" {config.batch_size}."
    )
