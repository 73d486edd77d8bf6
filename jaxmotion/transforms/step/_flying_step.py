"""Step whose exchange may be in flight while the next steps compute.

Between CPU hosts the caller's thread computes what the next step needs: what
`Scheme.own` selects of the state. A second thread computes the rest and sends.
Results are those of the one program, bit for bit.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxmotion import core, hosts
from jaxmotion.core import Array, PyTree
from jaxmotion.transforms.step import _local_work, _scheme

_LAST_COUNT = 2**31 - 1


class FlyingStep:
  """Calls a step as the program of its gradient, and those of two threads."""

  def __init__(
    self,
    scheme: _scheme.Scheme,
    compute: Callable[..., _local_work.LocalWork],
    update: Callable[..., tuple[_scheme.TrainState, PyTree]],
    mesh: Mesh,
    *,
    donate: bool,
  ):
    # compute, update: the halves of the step. Only the second one depends on
    # the phase of the scheme, and is compiled for each.
    self._scheme = scheme
    donated = (0,) if donate else ()

    def compute_own(
      own: PyTree, rest: _scheme.TrainState, batch: PyTree, **inputs: PyTree
    ) -> tuple[PyTree, _local_work.LocalWork]:
      # A program does not wait for arguments of which it reads the shapes
      # alone. So the rest may still be in flight.
      work = compute(scheme.replace_own(rest, own), batch, **inputs)
      return work.grads, work._replace(grads=None)

    def update_rest(
      state: _scheme.TrainState, work: _local_work.LocalWork, **extra_args: Any
    ) -> tuple[_scheme.TrainState, PyTree]:
      work = work._replace(grads=scheme.own(state))
      return update(state, work, **extra_args)

    self._compute = jax.jit(compute_own, donate_argnums=donated)
    self._update = hosts.StagedStep(
      update_rest,
      jax.jit(update_rest, donate_argnums=donated),
      mesh,
      len(donated),
      own=lambda made: (scheme.own(made[0]), scheme.count(made[0].opt_state)),
    )
    # Steps of the last state. To read its array would wait for that step.
    self._last: tuple[Array | None, int] = (None, 0)

  def __call__(
    self,
    state: _scheme.TrainState,
    batch: PyTree,
    *,
    key: Array | None = None,
    counts: Array | None = None,
    **extra_args: Any,
  ) -> tuple[_scheme.TrainState, PyTree]:
    """Runs a step; what it sends may be in flight when it returns."""
    scheme = self._scheme
    core.check_instance(
      "state", state, _scheme.TrainState, "the TrainState that `init` returned"
    )
    known: Any = scheme.count(state.opt_state)
    count = self._last[1] if known is self._last[0] else int(known)
    count = min(count + 1, _LAST_COUNT)
    own, rest = scheme.own(state), scheme.replace_own(state, None)
    own, work = self._compute(own, rest, batch, key=key, counts=counts)
    sending = hosts.Sending(phase=scheme.find_phase(count))
    state, metrics = self._update(
      scheme.replace_own(state, own), work, sending=sending, **extra_args
    )
    self._last = scheme.count(state.opt_state), count
    return state, metrics
