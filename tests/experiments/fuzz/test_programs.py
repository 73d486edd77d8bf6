import jax.numpy as jnp
import pytest

from experiments.fuzz import programs
from jaxmotion.memory.residuals.choose import Residual
from jaxmotion.memory.state import EncodedLeaf

SEEDS = [("residuals", 0), ("optimizer_in_backward", 3), ("host_resident", 1)]


@pytest.mark.parametrize(("kind", "seed"), [*SEEDS, ("compressed_state", 5)])
def test_programs_give_what_plain_training_gives(kind, seed):
  assert programs.check_program(kind, seed) == []


def test_wrong_residuals_are_found(monkeypatch):
  decode = Residual.decode

  def decode_wrongly(self, buffers):
    x = decode(self, buffers)
    return ~x if x.dtype == bool else x

  monkeypatch.setattr(Residual, "decode", decode_wrongly)
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


def test_an_error_that_names_no_argument_is_found(monkeypatch):
  def fail(program, data):
    raise TypeError("unsupported operand")

  monkeypatch.setitem(programs.CHECKS, "residuals", fail)
  (defect,) = programs.check_program("residuals", 0)
  assert defect.law == "an error names the argument"
  assert "unsupported operand" in defect.detail


def test_a_refusal_is_no_defect(monkeypatch):
  def refuse(program, data):
    raise ValueError("`params` must be positions of the 2 arguments, got 3.")

  monkeypatch.setitem(programs.CHECKS, "residuals", refuse)
  assert programs.check_program("residuals", 0) == []
