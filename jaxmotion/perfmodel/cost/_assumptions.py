"""Facts that no trace states: trips of loops, branches taken, the backend."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax

from jaxmotion import core, hosts, program

BACKENDS = ("cpu", "cuda", "rocm", "tpu")


class Assumptions:
  """Trips, branch shares and backend that the caller assumes."""

  def __init__(
    self,
    while_trips: int | Mapping[str, int] | None,
    branch_shares: Sequence[float] | None,
    backend: str | None,
  ):
    if branch_shares is not None:
      branch_shares = core.check_sequence(
        "branch_shares", branch_shares, "numbers"
      )
      for i, share in enumerate(branch_shares):
        core.check_number(f"branch_shares[{i}]", share, 0, 1)
    if isinstance(while_trips, Mapping):
      for name, trips in while_trips.items():
        core.check_int(f"while_trips[{name!r}]", trips, 0)
    elif while_trips is not None:
      core.check_int("while_trips", while_trips, 0)
    if branch_shares is not None and not math.isclose(
      math.fsum(branch_shares), 1
    ):
      raise ValueError(
        "`branch_shares` must be numbers of at least 0 that add up to 1, got "
        f"{branch_shares!r}."
      )
    if backend is not None:
      core.check_choice("backend", backend, BACKENDS)
    self.backend = jax.default_backend() if backend is None else backend
    self._trips, self._shares = while_trips, branch_shares
    self._loops: set[str] = set()
    self._branches: set[int] = set()

  def find_trips(self, step: program.Step) -> int:
    """Returns the trips of a while loop."""
    name = step.params["body_jaxpr"].jaxpr.debug_info.func_name
    if name == hosts.RUN_ONCE:
      return 1
    self._loops.add(name)
    trips = self._trips
    found = trips.get(name) if isinstance(trips, Mapping) else trips
    if found is None:
      raise ValueError(
        "`while_trips` must give the number of trips of every while loop; "
        f"{program.describe_equation(step.eqn)} has none, got {trips!r}."
      )
    return found

  def find_shares(self, count: int) -> Sequence[float] | None:
    """Returns the share of each of `count` branches, if the caller gave any."""
    self._branches.add(count)
    matches = self._shares is not None and len(self._shares) == count
    return self._shares if matches else None

  def check_used(self) -> None:
    """Raises if the caller named loops or branches that the program lacks."""
    if isinstance(self._trips, Mapping):
      for name in self._trips:
        if name not in self._loops:
          raise ValueError(
            "`while_trips` must name the body of a while loop of the program, "
            f"one of {sorted(self._loops)}, got {name!r}."
          )
    if self._shares is not None and len(self._shares) not in self._branches:
      raise ValueError(
        "`branch_shares` must have a share for each branch of a conditional, "
        f"one of {sorted(self._branches)} branches, got {self._shares!r}."
      )
