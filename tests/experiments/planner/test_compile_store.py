"""Compiled bytes are kept by the text of the program."""

import jax

from experiments.planner.compile_store import CompileStore
from experiments.residuals.cases import StepProgram


def test_a_program_is_compiled_once_whatever_plan_it_comes_from(tmp_path):
  path = tmp_path / "folder" / "known.jsonl"
  x = jax.ShapeDtypeStruct((256,), "float32")
  double, again, other = (
    StepProgram(fn, (x,))
    for fn in (lambda x: 2 * x, lambda y: 2 * y, lambda x: x[:64])
  )
  store = CompileStore("cpu", path)
  first, same, less = map(store.compile, (double, again, other))
  assert first.device_bytes == 2 * x.size * 4
  assert less.device_bytes == (x.size + 64) * 4
  assert same == first and store.known_s == first.compile_s > 0
  assert store.count == 3 and len(path.read_text().splitlines()) == 2
  # Another run reads what this one has written.
  later = CompileStore("cpu", path)
  assert later.compile(double) == first and later.compile(other) == less
  assert len(path.read_text().splitlines()) == 2
