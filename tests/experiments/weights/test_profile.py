import pytest

from experiments.weights.context import load_context
from experiments.weights.profile import PARTS, profile_steps


def test_a_step_is_timed_by_its_parts(tiny_hosted):
  context = load_context(tiny_hosted("weights_alexnet", cases=("awp", "int8")))
  rounds = []
  awp, int8 = profile_steps(
    context, {"awp": 1}, on_round=lambda: rounds.append(1)
  )
  assert len(rounds) == 2 * 3  # Truncation is there to compare packing with.
  for profile in (awp, int8):
    assert set(profile.ms) == set(PARTS)
    assert all(ms > 0 for ms in profile.ms.values())
  # Biases stay floats; each weight is sent as two bytes, or as one.
  plain = awp.returned_bytes
  assert awp.plain_bytes == int8.plain_bytes == plain
  assert plain / awp.sent_bytes == pytest.approx(2, rel=0.1)
  assert int8.sent_bytes == int8.returned_bytes < plain / 3
  # Arrays of a stage: a kernel and a bias, or two planes and a bias, or codes,
  # scales and a bias.
  stages = len(context.make_model(0).stages)
  arrays = [awp.returns, awp.sends, int8.sends, int8.returns]
  assert arrays == [2 * stages, 3 * stages, 3 * stages, 3 * stages]
