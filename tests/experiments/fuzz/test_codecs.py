"""Generated codecs: sound ones keep all laws, broken parts are found."""

import jax.numpy as jnp

from experiments.fuzz import codecs as fuzz
from experiments.fuzz.codecs import Setup
from jaxmotion import codecs, core, kernels
from jaxmotion.kernels import _block_layout

MINMAX = codecs.uniform(bits=8, symmetric=False)


def test_a_fixed_round_breaks_no_law():
  done = fuzz.run_round(1)
  assert done.cases > 300
  assert done.defects == ()


def find_laws(done):
  assert all("check_" in defect.case for defect in done.defects)
  return {defect.law for defect in done.defects}


def test_a_scale_that_loses_nan_is_found(monkeypatch):
  lost = lambda b, axes: jnp.nanmin(b, axis=axes, keepdims=True)
  monkeypatch.setattr(_block_layout, "min_element", lost)
  monkeypatch.setattr(_block_layout, "max_element", lost)
  setup = Setup(MINMAX, (7, 5), "float32")
  assert "nonfinite" in find_laws(fuzz.check_laws(setup, 0, 14))


def test_elements_that_become_infinite_are_found(monkeypatch):
  plain = lambda x, dtype: x.astype(dtype)
  monkeypatch.setattr(core, "saturate_cast", plain)
  nearest = codecs.truncate(bytes=2, rounding="nearest")
  setup = Setup(nearest, (6, 6), "float16")
  found = find_laws(fuzz.check_laws(setup, 0, 14))
  assert found & {"keeps_finite", "error"}


def test_a_memory_that_forgets_is_found(monkeypatch):
  halved = lambda decode, memory: memory.value * 0.5
  monkeypatch.setattr(kernels, "error_of", halved)
  setup = Setup(codecs.topk(density=0.3), (9,), "float32")
  law = "sent and remembered is what came and was remembered"
  assert law in find_laws(fuzz.check_memory(setup, 0))
