"""Local updates whose fragments are sent while the next steps compute.

Between CPU hosts the caller's thread computes: it has each worker's parameters
and the state of its optimizer. The sender's thread has the rest of the state:
what the workers agree on and send. Results are those of the one program, bit
for bit.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxmotion import core, hosts
from jaxmotion.core import Array, PyTree
from jaxmotion.transforms import _shardings, _states
from jaxmotion.transforms.local import _local_round
from jaxmotion.transforms.step import _averages, _local_work, _scheme

_LAST_COUNT = 2**31 - 1


def make_threaded_step(
  rounds: _local_round.LocalRounds,
  compute: Callable[..., _local_work.LocalWork],
  workers: _scheme.Workers,
  loss: _local_work.LossOptions,
  check: Callable[[dict[str, Any]], None],
  *,
  donate: bool,
) -> Callable[..., tuple[_scheme.TrainState, PyTree]]:
  """Makes the step as programs of two threads, which compute and send."""
  # A fragment lands in the step in which it is due, which waits for it there.
  # No earlier step does.
  programs = _Programs(rounds, workers.shardings, loss.mean_loss)
  sender = hosts.Sender(workers.mesh)

  def jit(fun: Callable[..., Any], *donated: int) -> Callable[..., Any]:
    return jax.jit(
      fun, static_argnums=(0,), donate_argnums=donated if donate else ()
    )

  def train(
    params: core.PerWorker,
    inner: core.PerWorker,
    count: Array,
    anchor: PyTree,
    *inputs: PyTree,
  ) -> tuple[core.PerWorker, core.PerWorker, _local_work.LocalWork]:
    # The anchor may still be on its way: its shapes alone are read.
    own = _states.LocalState(count, count, params, inner, (), (), ())
    work = compute(_scheme.TrainState(anchor, None, own), *inputs)
    return *work.grads, work._replace(grads=None)

  jit_train = jax.jit(train, donate_argnums=(0, 1) if donate else ())
  jit_average = jax.jit(programs.average)
  jit_change = jit(programs.find_change)
  jit_reset = jax.jit(
    programs.begin_anew, donate_argnums=(0, 1) if donate else ()
  )
  jit_land_own = jit(programs.land_own, 1)
  jit_land_anchor = jit(programs.land_anchor, 1)
  jit_send = jit(programs.send, 1, 2)

  def call(
    whole: _scheme.TrainState,
    batch: PyTree,
    *,
    key: Array | None = None,
    counts: Array | None = None,
    **extra_args: Any,
  ) -> tuple[_scheme.TrainState, PyTree]:
    core.check_instance(
      "state", whole, _scheme.TrainState, "the TrainState that `init` returned"
    )
    check(extra_args)
    _local_round.check_state(whole.opt_state)
    anchor, state = whole.params, whole.opt_state
    count = min(int(state.count) + 1, _LAST_COUNT)
    params, inner, work = jit_train(
      state.params, state.inner, state.count, anchor, batch, key, counts
    )
    metrics, weights = work.metrics, state.weights
    if loss.mean_loss or rounds.is_weighted:
      metrics, weights = sender.send(jit_average, work, weights)
    state = state._replace(count=programs.place_count(count), weights=weights)
    due, landing = (
      rounds.find_due(count, 0),
      rounds.find_due(count, rounds.delay),
    )
    if max(due, landing) < 0:
      state = state._replace(params=params, inner=inner)
      return _scheme.TrainState(anchor, None, state), metrics
    divided = rounds.divide(anchor)
    if due >= 0:
      change, is_bad = jit_change(
        due, divided.mask(anchor, due), divided.mask(params.value, due)
      )
      # It is this process's own worker that begins anew, without the others.
      if is_bad is not None and np.asarray(is_bad.addressable_data(0)).any():
        params, inner = jit_reset(params, inner, anchor)
    if landing >= 0:
      flying = divided.mask(state.flying[0], landing), state.flying[1]
      own = divided.mask(params.value, landing)
      own = jit_land_own(landing, own, flying)
      params = core.PerWorker(divided.replace(params.value, own))
      landed = sender.send(
        jit_land_anchor, landing, divided.mask(anchor, landing), flying
      )
      anchor = divided.replace(anchor, landed)
    if due >= 0:
      flying = divided.mask(state.flying[0], due), state.flying[1]
      shared = anchor, state.skipped, state.weights
      shared, (flying, outer) = sender.send(
        jit_send,
        due,
        shared,
        (flying, state.outer[due]),
        (change, is_bad),
        extra_args,
      )
      outers = list(state.outer)
      outers[due] = outer
      anchor = shared[0]
      state = state._replace(
        skipped=shared[1],
        weights=shared[2],
        outer=tuple(outers),
        flying=(divided.replace(state.flying[0], flying[0]), flying[1]),
      )
    state = state._replace(params=params, inner=inner)
    return _scheme.TrainState(anchor, None, state), metrics

  return call


class _Programs(NamedTuple):
  """Functions whose programs the two threads dispatch.

  Attributes:
    rounds: schedule, with a delay.
    mean_loss: whether each step sends its loss.
  """

  rounds: _local_round.LocalRounds
  shardings: _shardings.Shardings
  mean_loss: bool

  def average(
    self, work: _local_work.LocalWork, weights: Any
  ) -> tuple[PyTree, Any]:
    """Returns the step's metrics, and each worker's weights after it."""
    metrics = _averages.map_average(
      work,
      self.rounds.axis_name,
      self.mean_loss,
      self.shardings.map_options,
    )
    if self.rounds.is_weighted:
      assert work.weight is not None
      own = jnp.expand_dims(work.weight, 1)
      weights = jax.tree.map(lambda total: total + own, weights)
    return metrics, weights

  def find_change(
    self, k: int, anchor: PyTree, own: PyTree
  ) -> tuple[PyTree, Array | None]:
    """Returns how far workers went in a fragment, and which are not finite."""
    del k

    def find_own(anchor: PyTree, own: PyTree) -> PyTree:
      own = core.unpack_worker(core.PerWorker(own))
      is_bad = self.rounds.is_bad(own) if self.rounds.skips else None
      change = self.rounds.find_change(anchor, own)
      return core.pack_worker((change, is_bad)).value

    return self._map(find_own, (P(), self._split), self._split, anchor, own)

  def begin_anew(
    self, params: core.PerWorker, inner: core.PerWorker, anchor: PyTree
  ) -> tuple[core.PerWorker, core.PerWorker]:
    """Lets the workers of this process begin at the anchor."""

    def begin_own(
      params: core.PerWorker, inner: core.PerWorker, anchor: PyTree
    ) -> tuple[core.PerWorker, core.PerWorker]:
      values = params.value, inner.value
      own, fresh = self.rounds.begin_anew(values, anchor)
      return core.PerWorker(own), core.PerWorker(fresh)

    specs = (self._split, self._split, P())
    return self._map(begin_own, specs, specs[:2], params, inner, anchor)

  def land_own(
    self, k: int, own: PyTree, flying: tuple[PyTree, Array]
  ) -> PyTree:
    """Returns each worker's own parameters after a fragment has landed."""

    def land(own: PyTree, flying: tuple[PyTree, Array]) -> PyTree:
      return self.rounds.land(flying[1][k], (None, own), flying[0])[1]

    return self._map(land, (self._split, P()), self._split, own, flying)

  def land_anchor(
    self, k: int, anchor: PyTree, flying: tuple[PyTree, Array]
  ) -> PyTree:
    """Returns the anchor after a fragment has landed; arguments as above."""

    def land(anchor: PyTree, flying: tuple[PyTree, Array]) -> PyTree:
      return self.rounds.land(flying[1][k], (anchor, None), flying[0])[0]

    return self._map(land, (P(), P()), P(), anchor, flying)

  def send(
    self,
    k: int,
    shared: tuple[PyTree, Array, Any],
    own: tuple[tuple[PyTree, Array], PyTree],
    change: tuple[PyTree, Array | None],
    extra_args: dict[str, Any],
  ) -> tuple[PyTree, PyTree]:
    """Sends what workers have changed in a fragment."""
    # Returns `shared` and `own` after it.
    rounds = self.rounds
    anchor, skipped, weights = shared
    (landing, flags), outer = own

    def send_own(
      anchor: PyTree,
      values: tuple[PyTree, PyTree],
      flags: Array,
      weights: Any,
      change: PyTree,
      extra_args: dict[str, Any],
    ) -> PyTree:
      own_change, is_bad = core.unpack_worker(core.PerWorker(change))
      ok = None if is_bad is None else rounds.agree(is_bad)
      if rounds.is_weighted:
        weights = core.unpack_worker(weights)
        extra_args = extra_args | {"weight": weights[k]}
      values = rounds.send(ok, extra_args, values, anchor, own_change)
      is_sent = jnp.bool_(True) if ok is None else ok
      if rounds.is_weighted:
        kept = jnp.where(is_sent, 0, weights[k])
        weights = core.pack_worker(weights.at[k].set(kept))
      return values, flags.at[k].set(is_sent), weights, is_sent

    divided = rounds.divide(anchor)
    values_spec = P(), core.state_specs(outer, rounds.axis_name)
    weight_spec = core.state_specs(weights, rounds.axis_name)
    specs = (P(), values_spec, P(), weight_spec, self._split, P())
    (landing, outer), flags, weights, is_sent = self._map(
      send_own,
      specs,
      (values_spec, P(), weight_spec, P()),
      divided.mask(anchor, k),
      (landing, outer),
      flags,
      weights,
      change,
      extra_args,
    )
    skipped = skipped + (~is_sent).astype(jnp.int32)
    return (anchor, skipped, weights), ((landing, flags), outer)

  def place_count(self, count: int) -> Array:
    """Returns a number as an array that all processes hold."""
    # No program makes it, so that the next step can read it at once.
    sharding = NamedSharding(self.shardings.map_options["mesh"], P())
    return jax.make_array_from_callback((), sharding, lambda _: np.int32(count))

  @property
  def _split(self) -> P:
    return P(self.rounds.axis_name)

  def _map(
    self, fun: Callable[..., Any], in_specs: Any, out_specs: Any, *args: Any
  ) -> Any:
    args = self.shardings.place(args, in_specs)
    return jax.shard_map(
      fun, in_specs=in_specs, out_specs=out_specs, **self.shardings.map_options
    )(*args)
