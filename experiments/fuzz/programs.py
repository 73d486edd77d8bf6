"""Generated programs: what memory savings compute, against plain training."""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from experiments.fuzz import program_nodes, program_updates
from experiments.fuzz.program_nodes import Comparison
from experiments.fuzz.rounds import Defect, Round
from jaxmotion import codecs, memory

_EXACT = (
  *program_updates.EXACT_CODECS,
  (("mask|integer", memory.offload()), (".", codecs.identity())),
  lambda residual: memory.recompute() if residual.kind == "dense" else None,
)
_ROUNDING = (
  codecs.uniform(bits=8, block=128),
  codecs.uniform(bits=4, block=64, rounding="stochastic"),
  codecs.cast("bfloat16"),
  memory.offload(codecs.uniform(bits=8)),
)
Check = Callable[
  [np.random.Generator, np.random.Generator], Iterator[Comparison]
]


def run_round(seed: int) -> Round:
  """Checks some programs of each kind."""
  kinds = [kind for kind, count in _COUNTS.items() for _ in range(count)]
  defects = [
    defect
    for i, kind in enumerate(kinds)
    for defect in check_program(kind, len(kinds) * seed + i)
  ]
  return Round(len(kinds), tuple(defects))


def check_program(kind: str, seed: int) -> list[Defect]:
  """Checks one generated program."""
  # Where rounding in another order crosses a threshold, two correct programs
  # differ. A difference therefore counts if other data of the same program
  # shows one as well.
  case = f"programs.check_program({kind!r}, {seed})"
  found: list[Defect] = []
  for attempt in range(2):
    program, data = (np.random.default_rng([seed, n]) for n in (0, 1 + attempt))
    found = list(_find_defects(kind, program, data, case))
    if not found:
      break
  return found


def _find_defects(
  kind: str, program: np.random.Generator, data: np.random.Generator, case: str
) -> Iterator[Defect]:
  try:
    for comparison in CHECKS[kind](program, data):
      if detail := program_nodes.describe_difference(comparison):
        yield Defect(comparison.law, f"{case}  # {comparison.case}", detail)
  except Exception as e:
    if not is_refusal(e):
      lines = traceback.format_exception(e)
      yield Defect("an error names the argument", case, "".join(lines)[-3000:])


def is_refusal(error: Exception) -> bool:
  """Says whether an error names an argument and what it was."""
  if not isinstance(error, TypeError | ValueError):
    return False
  return bool(re.search(r"`\w+.*` must .*got ", str(error), re.DOTALL))


def check_residuals(
  rng: np.random.Generator, data: np.random.Generator
) -> Iterator[Comparison]:
  """Compares gradients with compressed residuals to plain ones."""
  nodes = program_nodes.make_nodes(rng, int(rng.integers(4, 10)))
  rounds = rng.random() < 0.3
  choices = _ROUNDING if rounds else _EXACT
  options: dict[str, Any] = {
    "codec": choices[rng.integers(len(choices))],
    "memory_budget": (None, 0.0, 0.5)[rng.integers(3)],
    "params": ((0,), (), (0, 1))[rng.integers(3)],
  }
  compress: Any = functools.partial(memory.compress_residuals, **options)
  inside = functools.partial(compress, params=())
  whole = rng.random() < 0.7
  plain = program_nodes.make_loss(nodes, lambda fn: fn)
  ours = program_nodes.make_loss(nodes, inside)
  ours = compress(ours) if whole else ours
  args = (program_nodes.make_params(data), *program_nodes.make_data(data), None)
  argnums = ((0, 1), 0, 1)[rng.integers(3)]

  def run(loss: Any) -> Any:
    grad = jax.value_and_grad(loss, argnums, has_aux=True)
    return program_nodes.compile_lightly(grad)(*args)

  (value, others), grads = run(plain)
  (our_value, our_others), our_grads = run(ours)
  tolerance = program_nodes.rounding_tolerance(nodes)
  text = f"{list(nodes)} {options} whole={whole} argnums={argnums}"
  yield Comparison(
    "the result is exact",
    text,
    (value, others),
    (our_value, our_others),
    tolerance,
  )
  yield Comparison(
    "gradients are finite" if rounds else "gradients are exact",
    text,
    grads,
    our_grads,
    None if rounds else tolerance,
  )


CHECKS: dict[str, Check] = {
  "residuals": check_residuals,
  "optimizer_in_backward": program_updates.check_optimizer_in_backward,
  "compressed_state": program_updates.check_compressed_state,
  "host_resident": program_updates.check_host_resident,
}
_COUNTS = {
  "residuals": 6,
  "optimizer_in_backward": 2,
  "compressed_state": 3,
  "host_resident": 1,
}
