"""Worker that trains an MLP on one host, with an exchange of jaxmotion."""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

from experiments.common import distributed
from experiments.hosts import cases, worker
from experiments.train.cases import exchange_with, settled_branches
from jaxmotion import make_train_step, presets, wire


class JaxBackend:
  """Backend of hosts that `jax.distributed` connects, one CPU device each."""

  warm_up = 3

  def __init__(self, arguments: argparse.Namespace):
    self._arguments = arguments
    self._state: Any = None  # Of the last step, which may still send.

  def connect(self) -> None:
    """Connects to the other hosts."""
    connect_hosts(self._arguments)

  def barrier(self) -> None:
    """Waits until all hosts call it."""
    jax.block_until_ready(self._state)
    multihost_utils.sync_global_devices("jaxmotion")

  def prepare(self, case: str) -> tuple[Callable[[], float], dict[str, Any]]:
    """Compiles the step of a case: `none`, or the name of an exchange."""
    jax.block_until_ready(self._state)
    if cases.is_carrier(case):
      send, words = cases.make_carrier(self._make_mesh(), case)

      def carry() -> float:
        jax.block_until_ready(send(words))
        return 0.0

      return carry, {}
    begin = time.perf_counter()
    facts: dict[str, Any] = {}
    if case == "none":
      step, state, batch = self._make_lone_step()
    else:
      step, state, batch = self._make_exchange_step(case)
    if case in cases.LOCAL_CASES:
      facts["period"] = cases.LOCAL_CASES[case]["every"]
    # What overlaps is several programs, which `step` runs.
    is_one = case == "none" or case.startswith(cases.ONE_PROGRAM)
    # A fragment in flight is sent during the steps that follow.
    is_overlapped = "delay" in cases.LOCAL_CASES.get(case, {})
    run_step = step.lower(state, batch).compile() if is_one else step
    facts["compile_s"] = time.perf_counter() - begin
    branches = (1,) if case in cases.LOCAL_CASES else settled_branches(case)
    sent = [
      wire.step_bytes(step, state, batch, branch=branch).total_bytes
      for branch in branches
    ]
    period = facts.get("period", 1)
    facts["predicted_bytes"] = statistics.mean(sent) / period

    def run() -> float:
      nonlocal state
      state, loss = run_step(state, batch)
      self._state = state
      if not is_overlapped:
        jax.block_until_ready(state)
      return np.asarray(loss.addressable_data(0)).item()

    return run, facts

  def _make_lone_step(self) -> tuple[Any, ...]:
    """Returns the step without exchange: every host trains its own model."""
    tx = self._make_optimizer()

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
      params, opt_state = state
      loss, grads = jax.value_and_grad(loss_fn)(params, batch)
      updates, opt_state = tx.update(grads, opt_state, params)
      return (optax.apply_updates(params, updates), opt_state), loss

    params = jax.tree.map(jax.device_put, make_params(self._arguments.widths))
    batch = jax.tree.map(jax.device_put, self._make_batch())
    return jax.jit(step, donate_argnums=0), (params, tx.init(params)), batch

  def _make_exchange_step(self, case: str) -> tuple[Any, ...]:
    """Returns the step of hosts that exchange, each step or every few."""
    mesh, tx, overlap = self._make_mesh(), self._make_optimizer(), None
    if case in cases.LOCAL_CASES:
      tx = presets.diloco(tx, **cases.LOCAL_CASES[case])
    else:
      if case.startswith(cases.ONE_PROGRAM):
        overlap = "program"
      tx = exchange_with(mesh, case.removeprefix(cases.ONE_PROGRAM), tx)
    # DDP does not average losses either.
    init, step = make_train_step(
      loss_fn, tx, mesh, mean_loss=False, overlap=overlap
    )
    split = jax.sharding.NamedSharding(mesh, jax.P("data"))
    # Each host makes its own part of the batch.
    batch = jax.tree.map(
      lambda x: jax.make_array_from_process_local_data(split, x),
      self._make_batch(),
    )
    return step, init(make_params(self._arguments.widths)), batch

  def _make_mesh(self) -> jax.sharding.Mesh:
    return make_mesh(self._arguments.hosts)

  def _make_optimizer(self) -> optax.GradientTransformation:
    name = self._arguments.optimizer
    make = {"sgd": optax.sgd, "adamw": optax.adamw}[name]
    return make(worker.OPTIMIZERS[name])

  def _make_batch(self) -> dict[str, np.ndarray]:
    rows, widths = self._arguments.batch, self._arguments.widths
    rng = np.random.default_rng(self._arguments.rank)
    return {
      "x": rng.standard_normal((rows, widths[0]), np.float32),
      "y": rng.integers(0, widths[-1], rows).astype(np.int32),
    }


def connect_hosts(arguments: argparse.Namespace, devices: int = 1) -> None:
  """Connects this process to the other hosts, each with so many devices."""
  jax.config.update("jax_platforms", "cpu")
  # No other number, even if the parent process has asked for one.
  jax.config.update("jax_num_cpu_devices", devices)
  if arguments.hosts > 1:
    distributed.initialize(
      coordinator_address=arguments.coordinator,
      num_processes=arguments.hosts,
      process_id=arguments.rank,
    )
  jax.devices()


def make_mesh(hosts: int) -> jax.sharding.Mesh:
  """Returns the mesh of hosts that have one device each."""
  return jax.make_mesh(
    (hosts,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )


def make_params(widths: Sequence[int]) -> dict[str, Any]:
  """Returns the parameters of the MLP, the same on all hosts."""
  rng = np.random.default_rng(0)
  return {
    f"layer{i}": {
      "kernel": rng.standard_normal((m, n), np.float32) * (2 / m) ** 0.5,
      "bias": np.zeros(n, np.float32),
    }
    for i, (m, n) in enumerate(itertools.pairwise(widths))
  }


def loss_fn(params: Any, batch: Any) -> Any:
  """Returns the mean cross-entropy of the MLP."""
  x = batch["x"]
  for i in range(len(params)):
    layer = params[f"layer{i}"]
    x = x if i == 0 else jax.nn.relu(x)
    x = x @ layer["kernel"] + layer["bias"][None, :]
  losses = optax.softmax_cross_entropy_with_integer_labels(x, batch["y"])
  return losses.mean()


def main() -> None:
  """Runs the parent's commands until it says quit."""
  arguments = worker.parse_arguments()
  worker.serve_parent(JaxBackend(arguments), arguments.interface)


if __name__ == "__main__":
  main()
