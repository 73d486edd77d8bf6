"""Calibration of this machine: curves, rates and platforms."""

import math

import jax
import jax.numpy as jnp
import pytest

from experiments.common import records
from experiments.perfmodel import measured
from experiments.perfmodel.rows import calibration_rows
from experiments.perfmodel.tables import calibration_table
from jaxmotion import codecs, perfmodel
from jaxmotion.calibration import (
  _calibrate as platforms,
  _probes as perfmodel_probes,
  calibrate_platform,
)
from jaxmotion.calibration._probes import Point, make_curve
from jaxmotion.perfmodel import Curve

WORKERS = 2


@pytest.fixture(scope="module")
def platform():
  done = []
  found = calibrate_platform(
    "lab",
    workers=WORKERS,
    codecs=[codecs.sign()],
    largest=1 << 16,
    sizes=2,
    repeats=2,
    report=done.append,
  )
  assert done == [1, 2] and found.name == "lab"
  return found


def test_everything_is_measured(platform):
  sign = codecs.sign()
  assert set(platform.device.measured) == {
    "matmul float32",
    "convolution float32",
    "elementwise",
    "reduction",
    *(f"{do} {sign!r}" for do in ("encode", "decode", "add")),
  }
  assert set(platform.axis("data").link.measured) == {
    f"{op} {WORKERS}" for op in perfmodel_probes.COLLECTIVES
  }
  for curve in platform.device.measured.values():
    assert 1 <= len(curve.sizes) <= 2
  assert platform.device.call_s > 0


def test_codecs_are_measured_at_sizes_that_parameters_have(platform):
  curve = platform.device.measured[f"encode {codecs.sign()!r}"]
  assert set(curve.sizes) <= {2.0**i for i in range(12, 17)}
  # Both ends are there, whatever lies between.
  probes = perfmodel_probes.update_probes(
    perfmodel_probes.make_mesh(1), 1 << 16, 5
  )
  sizes = [probe.size for probe in probes]
  assert sizes == [2.0**i for i in range(12, 17)]


def test_every_figure_says_when_and_how_well_it_was_measured(platform):
  missing = {"device.measured", "axes.data.measured"} | {
    f"{link}.{field}"
    for link in ("to_host", "from_host", "axes.data")
    for field in ("shared_by", "efficiency", "measured")
  }
  missing |= {"to_host.latency_s", "from_host.latency_s"}
  assert set(platform.figure_paths()) - set(platform.sources) == missing
  for text in platform.sources.values():
    assert text.startswith("measured 2")
    assert "2 emulated devices at once" in text
  assert "noise" in platform.sources["device.memory_rate"]


def test_a_step_can_be_predicted_and_says_what_was_not_measured(
  platform, tmp_path
):
  perfmodel.save_platform(platform, tmp_path / "here.json")
  again = perfmodel.load_platform(tmp_path / "here.json")
  assert again == platform

  def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w))

  w = jax.ShapeDtypeStruct((64, 64), "float32")
  own = perfmodel.trace_step(loss, w, (w,))
  step = perfmodel.predict_step(own, again, "data", codecs.sign())
  assert math.isfinite(step.total_s) and step.total_s > 0
  half = jax.ShapeDtypeStruct((64, 64), "bfloat16")
  missing = perfmodel.uncalibrated(
    again, perfmodel.predict_cost(lambda x: x @ x, half)
  )
  assert set(missing) == {"matmul bfloat16"}


def test_rows_and_a_table_have_every_size(platform, tmp_path):
  rows = calibration_rows(platform)
  records.write_rows(tmp_path / "rows.jsonl", rows)
  assert records.read_rows(tmp_path / "rows.jsonl") == rows
  table = calibration_table(platform)
  assert len(table.lines) == len(platform.device.measured) + 4


def exact(a, b, sizes=(1e3, 1e5, 1e7)):
  return Curve(sizes=sizes, seconds=tuple(a + b * x for x in sizes), noise=0)


def test_rates_and_latencies_are_those_of_the_lines():
  curves = {
    "matmul float32": exact(1e-6, 1e-11),
    "vector": exact(1e-6, 1e-10),
    "elementwise": exact(2e-6, 1e-10),
    "copy": exact(1e-5, 2e-10),
    # Over 4 workers: 1.5 and 3 bytes of wire for each byte of payload.
    "all_reduce 4": exact(6e-5, 1.5e-9),
    "all_gather 4": exact(3e-5, 6e-9),
  }
  found = platforms.make_platform("lab", "data", 4, 1e-4, curves)
  device, link = found.device, found.axis("data").link
  assert device.matmul_flops_per_s["float32"] == pytest.approx(1e11)
  assert device.vector_flops_per_s == pytest.approx(1e10)
  assert device.memory_rate.bytes_per_s == pytest.approx(1e10)
  assert device.kernel_s == pytest.approx(2e-6)
  assert device.call_s == 1e-4
  assert found.to_host.rate.bytes_per_s == pytest.approx(5e9)
  assert link.rate.bytes_per_s == pytest.approx(1e9)
  assert link.latency_s == pytest.approx(1e-5)
  assert link.efficiency == pytest.approx({"all_reduce": 1, "all_gather": 0.5})


def test_a_slope_within_rounding_is_ignored():
  seconds = (1e-3, 1e-3, 1e-3 * (1 + 1e-12))
  curve = Curve(sizes=(1e3, 1e4, 1e5), seconds=seconds, noise=0.0)
  assert platforms.fit_rate(curve) == pytest.approx(1e8)


def test_a_size_within_the_noise_of_a_call_is_left_out():
  points = [
    Point(size, seconds, noise)
    for size, seconds, noise in (
      (4.0, 2e-3, 0.1),
      (1.0, -1e-5, 0.9),
      (3.0, 3e-3, 0.2),
      (2.0, 9e-5, 0.8),
    )
  ]
  curve = make_curve(points, 1e-4)
  assert curve.sizes == (3.0, 4.0)
  assert curve.seconds == (2.5e-3, 2.5e-3)  # never decreasing: pooled
  assert curve.noise == pytest.approx(0.15)
  # Without the largest there would be no curve; its noise says what it is.
  assert make_curve(points[1:2], 1e-4).sizes == (1.0,)


def test_one_worker_has_no_link_to_measure():
  names = ("matmul float32", "vector", "elementwise", "copy")
  curves = {name: exact(1e-6, 1e-10) for name in names}
  alone = platforms.make_platform("lab", "data", 1, 1e-4, curves)
  assert alone.axes == ()
  assert len(calibration_table(alone).lines) == 2


def test_left_out_sizes_are_interpolated():
  straight = Curve(sizes=(1, 10, 100), seconds=(1, 10, 100), noise=0)
  assert measured.left_out_error(straight) == pytest.approx(0)
  bent = Curve(sizes=(1, 10, 100), seconds=(1, 20, 100), noise=0)
  assert measured.left_out_error(bent) == pytest.approx(0.5)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (dict(workers=10_000), "`workers` must be at most"),
    (dict(workers=0), "`workers` must be"),
    (dict(codecs=["sign"]), r"`codecs\[0\]` must be a codec"),
    (dict(codecs=codecs.sign()), "`codecs` must be"),
    (dict(largest=100), "`largest` must be"),
    (dict(sizes=1), "`sizes` must be"),
    (dict(repeats=0), "`repeats` must be"),
    (dict(axis=3), "`axis` must be"),
    (dict(name=None), "`name` must be"),
    (dict(report=3), "`report` must be"),
  ],
)
def test_impossible_arguments_are_named(arguments, message):
  with pytest.raises((TypeError, ValueError), match=message):
    calibrate_platform(**arguments)
