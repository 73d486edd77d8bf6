import pytest

from experiments.weights import profile as weights_profile, trainer


def test_a_step_is_taken_apart(tiny_hosted):
  config = tiny_hosted("weights_alexnet", cases=("awp", "int8"))
  turns = []
  awp, int8 = weights_profile.measure(
    trainer.load(config), {"awp": 1}, on_round=lambda: turns.append(1)
  )
  assert len(turns) == 2 * 3  # Truncation is there to compare packing with.
  for profile in (awp, int8):
    assert set(profile.ms) == set(weights_profile.PIECES)
    assert all(ms > 0 for ms in profile.ms.values())
  # Of what is sent, biases stay floats: two bytes a weight, or one.
  plain = awp.returned_bytes
  assert awp.plain_bytes == int8.plain_bytes == plain
  assert plain / awp.sent_bytes == pytest.approx(2, rel=0.1)
  assert int8.sent_bytes == int8.returned_bytes < plain / 3
  # A kernel and a bias a layer; its planes, or its codes and scales, and a
  # bias.
  assert (awp.returns, awp.sends, int8.sends, int8.returns) == (18, 27, 27, 27)
