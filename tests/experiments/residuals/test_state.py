import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import gpu_compile
from experiments.common import records
from experiments.residuals import state
from experiments.residuals.state import PACKINGS, list_programs

WIDTH = 16


def test_the_order_in_which_state_comes_changes_no_bit():
  params = {"a": jnp.ones((WIDTH, WIDTH)), "b": jnp.full((WIDTH, 3), 2.0)}
  grads = jax.tree.map(lambda p: jnp.sin(p * 3), params)
  found = {}
  for _, case, fn, tx, _ in list_programs():
    if "host" in case:
      found[case] = jax.jit(fn)(params, grads, jax.jit(tx.init)(params))
  for name in PACKINGS:
    ours, naive = (
      [np.asarray(a).tobytes() for a in jax.tree.leaves(found[case])]
      for case in (f"{name}_host", f"{name}_host_naive")
    )
    assert ours == naive
  steps = {int(last.steps) for _, last in found.values()}
  assert steps == {2}


def test_rows_say_that_nothing_ran(tmp_path, monkeypatch):
  if why := gpu_compile.explain_refusal():
    pytest.skip(why)
  monkeypatch.setattr(state, "OPTIMIZERS", {"adam": optax.adam(1e-3)})
  found = state.compile_all(8, 512, "H100")
  records.write_rows(tmp_path / "rows", state.make_rows(found, 8, 512))
  found = {
    (row.case.rpartition("/")[2], row.metric): row
    for row in records.read_rows(tmp_path / "rows")
    if row.case.startswith("adam/")
  }
  assert all("not run" in row.machine for row in found.values())
  leaf = 512 * 512 * 4
  assert found["plain", "argument_bytes"].value == pytest.approx(
    8 * 4 * leaf, rel=1e-3
  )
  assert found["packed", "argument_bytes"].ratio < 0.65
  # Of the 16 moments, about four are decoded at a time.
  assert found["packed", "temp_bytes"].value < 5 * leaf
  for name in PACKINGS:
    assert found[f"{name}_host", "temp_bytes"].ratio < 1


def test_without_the_compiler_it_says_why(monkeypatch):
  monkeypatch.setattr(gpu_compile, "explain_refusal", lambda: "no wheels")
  monkeypatch.setattr(gpu_compile, "stay_on_host", lambda: None)
  with pytest.raises(SystemExit, match="for a GPU: no wheels"):
    state.main()
