import dataclasses
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import pytest

from jaxmotion import codecs, perfmodel
from jaxmotion.perfmodel import Curve, Kernel
from jaxmotion.perfmodel.extend import (
  decode_seconds,
  encode_seconds,
  kernel_seconds,
)
from jaxmotion.wire import Ledger, Move

HOST = perfmodel.builtin_platform("ethernet_1gbit")
CURVE = Curve(sizes=(1e3, 1e6), seconds=(1e-3, 1e-2), noise=0.1)


def measuring(**curves):
  device = dataclasses.replace(HOST.device, measured=curves)
  return dataclasses.replace(HOST, device=device)


SIZES = st.lists(st.floats(1, 1e9), min_size=1, max_size=9, unique=True)


@hypothesis.given(SIZES, st.data())
def test_a_curve_passes_through_its_points_and_never_falls(sizes, data):
  sizes = sorted(sizes)
  seconds = sorted(data.draw(st.floats(1e-6, 10)) for _ in sizes)
  hypothesis.assume(all(b / a > 1.001 for a, b in itertools.pairwise(sizes)))
  curve = Curve(sizes=sizes, seconds=seconds, noise=0)
  for size, second in zip(sizes, seconds, strict=True):
    assert curve.seconds_at(size) == pytest.approx(second)
  queries = sorted(data.draw(st.lists(st.floats(0, 1e10), max_size=9)))
  found = [curve.seconds_at(query) for query in queries]
  assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(found))


@pytest.mark.parametrize(("a", "b"), [(1e-4, 2e-9), (0, 3e-9), (1e-3, 0)])
def test_a_line_is_recovered_and_holds_below_the_smallest_size(a, b):
  sizes = tuple(10.0**i for i in range(3, 9))
  seconds = tuple(a + b * x for x in sizes)
  curve = Curve(sizes=sizes, seconds=seconds, noise=0)
  assert curve.fit_line() == pytest.approx((a, b, 0), rel=1e-6, abs=1e-12)
  for x in (0.0, 10.0, 1e2):
    expected = pytest.approx(a + b * x, rel=1e-6, abs=1e-12)
    assert curve.seconds_at(x) == expected


def test_fit_line_weighs_relative_errors_and_has_no_negative_coefficient():
  sizes, seconds = (1e3, 1e9), (1e-4, 1.0)
  crooked = Curve(sizes=(1e3, 1e6, 1e9), seconds=(1e-4, 2e-3, 1.0), noise=0)
  straight = Curve(sizes=sizes, seconds=seconds, noise=0).fit_line()
  a, b, error = crooked.fit_line()
  assert 0 < error < 0.4
  assert a == pytest.approx(straight[0], rel=0.4)
  assert b == pytest.approx(straight[1], rel=0.4)
  steep = Curve(sizes=(1, 2, 4), seconds=(1, 8, 64), noise=0).fit_line()
  assert min(steep) >= 0


def test_a_kernel_curve_replaces_one_side_of_the_roofline():
  device = measuring(**{"matmul float32": CURVE, "elementwise": CURVE}).device
  product = Kernel("matmul", "float32", 1e6, 1e3, 2)
  assert kernel_seconds(product, device) == pytest.approx(2e-2)
  # The other side of the roofline is still a bound.
  moving = product._replace(bytes=1e10, count=1)
  assert kernel_seconds(moving, device) == pytest.approx(1e10 / 50e9)
  chain = Kernel("elementwise", "float32", 0, 1e3)
  assert kernel_seconds(chain, device) == pytest.approx(1e-3)
  assert kernel_seconds(chain._replace(flops=4e12), device) == 1
  other = Kernel("reduction", "float32", 0, 1e3)
  assert kernel_seconds(other, device) == kernel_seconds(other, HOST.device)


def test_a_codec_curve_replaces_the_trace():
  codec = codecs.sign()
  names = [f"{do} {codec!r}" for do in ("encode", "decode", "add")]
  device = measuring(**dict.fromkeys(names, CURVE)).device
  assert encode_seconds(codec, 10**6, device) == CURVE.seconds_at(1e6)
  decoding = decode_seconds(codec, 10**6, 3, device)
  assert decoding == pytest.approx(3 * CURVE.seconds_at(1e6))
  other = codecs.sign(block=64)
  expected = encode_seconds(other, 10**6, HOST.device)
  assert encode_seconds(other, 10**6, device) == expected
  assert encode_seconds(codec, 0, device) == 0


def test_a_collective_curve_holds_for_its_number_of_workers():
  plain, seconds = HOST.axis("data").link, perfmodel.collective_seconds
  link = dataclasses.replace(plain, measured={"all_reduce 4": CURVE})
  assert seconds("all_reduce", 1e6, 4, link) == CURVE.seconds_at(1e6)
  for op, workers in (("all_reduce", 8), ("all_gather", 4)):
    found = seconds(op, 1e6, workers, link)
    assert found == seconds(op, 1e6, workers, plain)


def test_kernels_and_collectives_without_a_curve_are_listed():
  x = jax.ShapeDtypeStruct((64, 64), "float32")
  cost = perfmodel.predict_cost(lambda x: (x @ x + 1).sum(), x)
  platform = measuring(**{"matmul float32": CURVE})
  missing = perfmodel.uncalibrated(platform, cost)
  assert set(missing) == {"reduction"}  # the sum, with what is fused into it
  large = jax.ShapeDtypeStruct((1024, 1024), "float32")
  cost = perfmodel.predict_cost(lambda x: x @ x, large)
  missing = perfmodel.uncalibrated(platform, cost)
  assert missing == {"matmul float32": (2 * 1024**3,) * 2}
  move = Move("all_reduce", ("data",), 8, "float32", 10**4, 1)
  ledger = Ledger((move,))
  missing = perfmodel.uncalibrated(platform, None, ledger)
  assert missing == {"all_reduce 8": (1e4, 1e4)}


@pytest.mark.parametrize(
  ("changes", "match"),
  [
    ({"sizes": (1e6, 1e3)}, "`sizes` must increase"),
    ({"seconds": (1e-2, 1e-3)}, "`seconds` must never decrease"),
    ({"seconds": (1e-3,)}, "`seconds` must be as many"),
    ({"seconds": (0.0, 1.0)}, r"`seconds\[0\]` must be a number in \(0, inf"),
  ],
)
def test_an_invalid_curve_is_refused(changes, match):
  with pytest.raises(ValueError, match=match):
    dataclasses.replace(CURVE, **changes)
  with pytest.raises(TypeError, match=r"`measured\['elementwise'\]` must be"):
    measuring(elementwise=1e-3)
