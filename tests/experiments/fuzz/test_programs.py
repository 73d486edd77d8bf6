import copy

import jax.numpy as jnp
import pytest

from experiments.fuzz import programs
from jaxmotion.memory import EncodedLeaf
from jaxmotion.memory.residuals import Residual

SEEDS = [("residuals", 0), ("optimizer_in_backward", 3), ("host_resident", 1)]


@pytest.mark.parametrize(("kind", "seed"), [*SEEDS, ("compressed_state", 5)])
def test_programs_give_what_plain_training_gives(kind, seed):
  assert programs.check_program(kind, seed) == []


def test_wrong_residuals_are_found(monkeypatch):
  make_coder = Residual.coder.fget

  def make_wrong_coder(residual):
    right = make_coder(residual)
    wrong = copy.copy(right)
    is_mask = residual.kind == "mask"
    wrong.decode = lambda b: ~right.decode(b) if is_mask else right.decode(b)
    return wrong

  monkeypatch.setattr(Residual, "coder", property(make_wrong_coder))
  (defect,) = programs.check_program("residuals", 0)
  assert defect.law == "gradients are exact"


def test_wrong_state_is_found(monkeypatch):
  def forget(self):
    return jnp.zeros(self.shape, self.dtype)

  monkeypatch.setattr(EncodedLeaf, "decode", forget)
  laws = {d.law for d in programs.check_program("compressed_state", 5)}
  assert laws == {
    "updates from encoded state are those of optax",
    "decoded state is exact",
  }


def test_an_error_that_names_no_argument_is_found_and_a_refusal_is_none(
  monkeypatch,
):
  def check(error):
    def fail(program, data):
      raise error

    monkeypatch.setitem(programs.CHECKS, "residuals", fail)
    return programs.check_program("residuals", 0)

  (defect,) = check(TypeError("unsupported operand"))
  assert defect.law == "an error names the argument"
  assert "unsupported operand" in defect.detail
  text = "`params` must be positions of the 2 arguments, got 3."
  assert check(ValueError(text)) == []
