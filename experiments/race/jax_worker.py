"""Worker that trains the decoder on one host with jaxmotion."""

import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

from experiments.hosts import jax_worker
from experiments.race import cases, worker
from experiments.train.cases import settled_branches
from experiments.train.decoder import WEIGHT_DECAY, list_rates
from jaxmotion import make_train_step, wire


class JaxTrainer:
  """One case of jaxmotion, compiled and at its initial parameters."""

  def __init__(self, place: worker.Place, order: worker.Order):
    self._place, self._order = place, order
    hosts = place.arguments.hosts
    mesh = jax_worker.make_mesh(hosts)
    self._split = jax.sharding.NamedSharding(mesh, jax.P("data"))
    rates = jnp.asarray(list_rates(order.rate, order.steps))
    tx = optax.adamw(lambda count: rates[count], weight_decay=WEIGHT_DECAY)
    network = place.decoder.network
    self._init, self._step = make_train_step(
      network.loss,
      cases.make_scheme(order.case, mesh, tx),
      mesh,
      mean_loss=False,
    )
    self._state: Any = None
    self._restart()
    self._warm_up()
    self.facts = self._count_bytes()
    self._loss = jax.jit(network.loss)
    self.evaluate()
    self._restart()

  def step(self, index: int) -> float:
    """Takes a step, counted from 0, and returns the host's own loss."""
    self._state, loss = self._step(self._state, self._make_batch(index))
    if self._order.case not in cases.IN_FLIGHT:
      jax.block_until_ready(self._state)
    return np.asarray(loss.addressable_data(0)).item()

  def settle(self) -> None:
    """Waits for all that is under way on all hosts."""
    jax.block_until_ready(self._state)
    if self._place.arguments.hosts > 1:
      multihost_utils.sync_global_devices("jaxmotion")

  def evaluate(self) -> float:
    """Returns the mean loss of the host's part of the held-out text."""
    own = lambda a: a.addressable_data(0)
    params = jax.tree.map(own, self._state.params)
    tokens, labels = self._place.held_out()
    losses = [
      float(self._loss(params, (tokens[i:j], labels[i:j])))
      for i, j in worker.cut_range(len(tokens))
    ]
    return statistics.fmean(losses)

  def _restart(self) -> None:
    jax.block_until_ready(self._state)
    params = self._place.decoder.make_params(self._order.seed)
    self._state = self._init(params)

  def _warm_up(self) -> None:
    """Compiles every program: a period of steps, or two of one."""
    for index in range(cases.EVERY if self._order.case in cases.LOCAL else 2):
      self.step(index)
    self.settle()

  def _make_batch(self, index: int) -> Any:
    own = self._place.make_batch(self._order.seed, index)
    return jax.tree.map(
      lambda x: jax.make_array_from_process_local_data(self._split, x), own
    )

  def _count_bytes(self) -> dict[str, Any]:
    """Returns what the traced program sends, for the prediction."""
    case = self._order.case
    every = cases.EVERY if case in cases.LOCAL else 1
    branches = (1,) if every > 1 else settled_branches(case)
    batch = self._make_batch(0)
    ledgers = [
      wire.step_bytes(self._step, self._state, batch, branch=branch)
      for branch in branches
    ]
    moves = [
      [move.op, move.payload_bytes, move.count]
      for move in (move for ledger in ledgers for move in ledger.moves)
    ]
    share = every * len(ledgers)
    total = sum(ledger.total_bytes for ledger in ledgers) / share
    return {"wire_bytes_predicted": total, "moves": moves, "share": share}


if __name__ == "__main__":
  worker.serve_parent(jax_worker.connect_hosts, JaxTrainer)
