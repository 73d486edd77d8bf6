"""What is asked of the planner."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jaxmotion.codecs import Codec
from jaxmotion.collectives.extend import shard_like
from jaxmotion.core import PyTree
from jaxmotion.perfmodel import Platform, StepCost, StepPrediction, predict_step
from jaxmotion.planner.exchange._buckets import Route
from jaxmotion.planner.exchange._errors import Errors


@dataclasses.dataclass(frozen=True, eq=False)
class ExchangeProblem:
  """A step and what may be done to its exchange.

  Attributes:
    work: what one worker computes.
    route: how gradients travel.
    candidates: codecs to choose from; the first is full precision.
    accuracy_budget: greatest relative error of the gradient.
    errors: of every codec on every tensor.
  """

  work: StepCost
  route: Route
  candidates: tuple[Codec, ...]
  accuracy_budget: float
  errors: Errors

  @property
  def workers(self) -> int:
    """How many exchange."""
    return self.route.platform.axis(self.route.axis).workers

  def limits(self) -> tuple[np.ndarray, float]:
    """Squared errors of every codec on every tensor, and of their sum."""
    return self.errors.limits(self.accuracy_budget)

  def affords(self, choice: np.ndarray) -> bool:
    """Whether the errors of a choice fit in the budget."""
    errors, limit = self.limits()
    return bool(errors[np.arange(len(choice)), choice].sum() <= limit)

  def exchanged(self) -> PyTree:
    """What each worker, or each device of a host, encodes."""
    route = self.route
    if route.local_axis is None:
      return self.work.params
    devices = route.platform.axis(route.local_axis).workers
    return jax.tree.map(lambda a: shard_like(a, devices), self.work.params)

  def step(self, codec: Codec | None, method: str | None) -> StepPrediction:
    """Predicts the step with a codec."""
    route = self.route
    return predict_step(
      self.work,
      route.platform,
      route.axis,
      codec,
      bucket_bytes=route.bucket_bytes,
      overlap=route.overlap,
      method=method,
      local_axis=route.local_axis,
      algorithm=route.algorithm,
    )

  def on(self, platform: Platform) -> ExchangeProblem:
    """The same on another platform."""
    route = dataclasses.replace(self.route, platform=platform)
    return dataclasses.replace(self, route=route)
