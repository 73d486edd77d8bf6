"""Tables say of every choice what the performance model says of a step."""

import dataclasses

import numpy as np
import pytest

from jaxmotion import codecs, perfmodel
from jaxmotion.perfmodel import Curve, predict_step
from jaxmotion.planner.exchange._buckets import Route
from jaxmotion.planner.exchange._prices import TensorCosts
from jaxmotion.planner.exchange._table import make_table
from tests.planner.problems import (
  PARAMS,
  THREE,
  WORK,
  cluster,
  every_choice,
  rules_of,
)

CHOICES = every_choice(3, 3)
BESIDE = (CHOICES == 2).any(1)  # Something that is not summed.


def table(route, method, *, mixed=True, candidates=THREE):
  return make_table(WORK, TensorCosts(route), candidates, method, mixed=mixed)


def predicted(route, choice, method, candidates=THREE):
  return predict_step(
    WORK,
    route.platform,
    route.axis,
    rules_of(choice, candidates),
    bucket_bytes=route.bucket_bytes,
    overlap=route.overlap,
    method=method,
    local_axis=route.local_axis,
    algorithm=route.algorithm,
  )


ROUTES = {
  "one": Route(cluster(1), "data"),
  "two": Route(cluster(2), "data"),
  "two_buckets": Route(cluster(2), "data", bucket_bytes=1),
  "eight": Route(cluster(8), "data"),
  "blocking": Route(cluster(8), "data", overlap=False, bucket_bytes=1 << 16),
  "buckets": Route(cluster(8, gbit=100), "data", bucket_bytes=1),
  "tree": Route(cluster(8), "data", algorithm="tree"),
  "hosts": Route(
    perfmodel.builtin_platform("h100_cluster").resize(host=4), "host", "device"
  ),
}


@pytest.mark.parametrize("method", ["gather", "two_phase"])
@pytest.mark.parametrize("name", ROUTES)
def test_a_step_is_as_long_as_the_performance_model_says(name, method):
  route = ROUTES[name]
  figures = table(route, method)
  chosen = CHOICES[BESIDE][::3]
  expected = [predicted(route, c, method) for c in chosen]
  assert figures.totals(chosen).tolist() == pytest.approx(
    [step.total_s for step in expected], rel=1e-9
  )
  for choice, step in zip(chosen, expected, strict=True):
    sent = sum(figures.wire_bytes(i, c) for i, c in enumerate(choice))
    assert sent == pytest.approx(step.wire_bytes)


def test_sums_between_two_workers_are_alone_or_join_what_is_not_summed():
  route = ROUTES["two"]
  own = (codecs.identity(), codecs.uniform(bits=8))
  alone, beside = (
    table(route, "gather", mixed=mixed, candidates=own)
    for mixed in (False, True)
  )
  nothing, all_but_bias = np.zeros(3, int), np.array([0, 1, 1])
  for figures, choice in ((alone, nothing), (beside, all_but_bias)):
    step = predicted(route, choice, "gather", own)
    assert figures.total(choice) == pytest.approx(step.total_s, rel=1e-9)
  assert alone.total(all_but_bias) != pytest.approx(
    beside.total(all_but_bias), rel=1e-6
  )


def test_measured_collectives_are_followed_within_a_thousandth():
  platform = cluster(8)
  (axis,) = platform.axes
  curve = Curve(
    sizes=(1e2, 1e4, 1e5, 1e7), seconds=(1e-4, 5e-4, 1e-2, 0.4), noise=0.1
  )
  link = dataclasses.replace(
    axis.link,
    measured={f"{op} 8": curve for op in ("all_reduce", "all_to_all")},
  )
  route = Route(
    dataclasses.replace(platform, axes=(dataclasses.replace(axis, link=link),)),
    "data",
  )
  figures = table(route, "two_phase")
  for choice in CHOICES[::5]:
    step = predicted(route, choice, "two_phase")
    assert figures.total(choice) == pytest.approx(step.total_s, rel=1e-3)


def test_a_tensor_is_priced_once():
  prices = TensorCosts(ROUTES["eight"])
  like = PARAMS["first"]
  one = prices.price(THREE[0], like, "gather", True)
  assert prices.price(THREE[0], like, "two_phase", False) is one
  assert prices.price(THREE[1], like, "two_phase", False) is not one
