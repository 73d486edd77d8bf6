import dataclasses

import pytest

from experiments.perfmodel import cases, predict
from experiments.perfmodel.cases import Case
from jaxmotion import perfmodel
from jaxmotion.core import tree_bytes
from jaxmotion.perfmodel import Curve

BATCHES = (8, 32, 128)
GRID = cases.make_grid(
  (16, 64),
  BATCHES,
  [(64, 16), (64, 8), (32, 8)],
  ["none", "fp32", "sign_feedback"],
)


def law_seconds(case, fixed=1e-9, rate=1e-10):
  """Seconds by the law: bytes of parameters, and FLOPs."""
  flops = cases.trace_case(case).gradient.flops
  return fixed * predict._param_bytes(case) + rate * flops


def test_held_out_cases_list_what_no_known_case_has():
  assert [case.exchange for case in GRID.known] == ["none"] * 6
  assert not set(GRID.known) & set(GRID.held_out)
  unseen = {
    (c.width, c.batch, c.exchange): GRID.list_unseen(c) for c in GRID.held_out
  }
  assert unseen == {
    (64, 16, "none"): "batch",
    (64, 16, "fp32"): "batch, exchange",
    (64, 16, "sign_feedback"): "batch, exchange",
    (64, 8, "fp32"): "exchange",
    (64, 8, "sign_feedback"): "exchange",
    (32, 8, "none"): "width",
    (32, 8, "fp32"): "width, exchange",
    (32, 8, "sign_feedback"): "width, exchange",
  }


def known_seconds(factor=1):
  return {case: factor * law_seconds(case) for case in GRID.known}


def test_steps_by_the_law_are_predicted_at_other_batches_and_widths():
  case = Case(64, 8, "none")
  param_bytes = tree_bytes(cases.trace_case(case).params)
  assert param_bytes == predict._param_bytes(case)
  base_step = predict.BaseStepModel(known_seconds())
  for case in (Case(64, 16, "none"), Case(16, 512, "none")):
    assert base_step.predict_seconds(case) == pytest.approx(
      law_seconds(case), rel=1e-6
    )
  between = Case(32, 64, "none")
  assert base_step.predict_seconds(between) == pytest.approx(
    law_seconds(between), rel=1e-3
  )


def test_a_step_with_an_exchange_is_that_without_and_the_exchange():
  platform = perfmodel.builtin_platform("ethernet_1gbit").resize(data=2)
  base_step = predict.BaseStepModel(known_seconds())
  plain, coded = (Case(64, 16, n) for n in ("none", "sign_feedback"))
  exchange = perfmodel.predict_exchange(
    cases.trace_case(coded).params, platform, "data", coded.codec
  )
  assert predict.predict_case(
    platform, base_step, plain
  ) == base_step.predict_seconds(plain)
  assert predict.predict_case(platform, base_step, coded) == pytest.approx(
    base_step.predict_seconds(coded) + exchange.total_s
  )


def emulated(workers, seconds):
  """A platform whose curves all take so many seconds."""
  plain = perfmodel.builtin_platform("ethernet_1gbit").resize(data=workers)

  def curve(factor):
    return Curve(sizes=(1e3, 1e6), seconds=(factor, 9 * factor), noise=0.1)

  (axis,) = plain.axes
  link = dataclasses.replace(
    axis.link, measured={f"all_reduce {workers}": curve(seconds)}
  )
  device = dataclasses.replace(
    plain.device, measured={"elementwise": curve(seconds)}, call_s=seconds
  )
  axis = dataclasses.replace(axis, link=link)
  return dataclasses.replace(plain, device=device, axes=(axis,))


def test_emulated_devices_share_what_all_of_them_take():
  platforms = {2: emulated(2, 1e-3), 4: emulated(4, 2e-3)}
  three = predict.interpolate_platform(platforms, 3)
  assert three.device.call_s == pytest.approx(1.5e-3)
  curve = three.device.measured["elementwise"]
  assert curve.seconds_at(1e3) == pytest.approx(1.5e-3)
  assert curve.seconds_at(1e6) == pytest.approx(9 * 1.5e-3)
  # All wires together: 3 * 2 * 2/3 of the payload instead of 4 * 2 * 3/4.
  link = three.axis("data").link
  assert three.axis("data").workers == 3
  assert link.measured["all_reduce 3"].seconds_at(1e3) == pytest.approx(
    2e-3 * 4 / 6
  )
  known = {n: known_seconds(n) for n in (2, 4)}
  base_step = predict.interpolate_base_step(known, 3)
  case = Case(64, 16, "none")
  assert base_step.predict_seconds(case) == pytest.approx(
    3 * law_seconds(case), rel=1e-6
  )
  with pytest.raises(ValueError, match="`workers` must lie between"):
    predict.interpolate_platform({2: emulated(2, 1e-3)}, 3)
