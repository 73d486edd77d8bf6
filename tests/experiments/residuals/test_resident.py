"""Steps whose memory is limited by the system."""

import pytest

from experiments.residuals import control_group, resident
from experiments.train import decoder

pytestmark = pytest.mark.skipif(
  control_group.explain_refusal() is not None,
  reason="memory cannot be limited here",
)
SMALL = decoder.Shape(layers=2, channels=64, heads=2, length=64, batch=4)
DEEP = decoder.Shape(layers=60, channels=64, heads=2, length=16, batch=2)


def test_a_step_holds_what_its_compiler_stated_or_is_killed():
  list_groups = lambda: set(control_group._find_files().folder.glob("jaxmo*"))
  before = list_groups()  # Of other jobs.
  # A thread takes a megabyte or two beside the arrays of a step.
  ran = resident.try_size("plain", SMALL, 1 << 30)
  arrays, used = ran.compiled_bytes, ran.used_bytes
  assert arrays <= used <= 1.5 * arrays + (16 << 20)
  assert ran.device_bytes == used
  killed = resident.try_size("plain", SMALL, arrays // 2)
  assert killed.used_bytes is None
  assert killed.compiled_bytes == arrays
  assert killed.device_bytes >= arrays
  assert list_groups() <= before


def test_what_making_parameters_takes_does_not_count():
  ran = resident.try_size("int4_adamw_8bit", DEEP, 1 << 30)
  assert ran.used_bytes is not None
  assert ran.compiled_bytes <= ran.used_bytes <= 1.2 * ran.compiled_bytes


def test_a_model_that_no_plan_fits_does_not_run():
  refused = resident.try_size("fitted", SMALL, 1 << 20)
  assert refused.used_bytes is None and refused.device_bytes > 1 << 20
  assert refused.compiled_bytes > 1 << 20


def test_a_planned_model_trains(monkeypatch):
  monkeypatch.setattr(resident, "LEAST", SMALL)
  losses = [resident.train_mode("fitted", n, 1 << 30) for n in (0, 8)]
  assert losses[1] < losses[0]
