"""Optimizers that workers divide between them (ZeRO), as algorithms."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import jax
import optax
from jax.sharding import PartitionSpec as P

from jaxmotion import codecs, core, perfmodel, presets, transforms, wire
from jaxmotion.core import PyTree
from jaxmotion.perfmodel.extend import decode_seconds, encode_seconds
from jaxmotion.planner.exchange import _algorithm_choice, _problem
from jaxmotion.transforms.extend import (
  ShardedOptions,
  find_exchanges,
  trace_state,
)

_PARTS = "Each worker keeps a part of the optimizer's state"


def weigh_sharded(
  problem: _problem.ExchangeProblem, uncompressed: perfmodel.StepPrediction
) -> Iterator[_algorithm_choice.AlgorithmChoice]:
  """Yields the ways in which workers divide the optimizer."""
  axis = problem.mesh_axis
  optimizer, tree = problem.step_cost.optimizer, problem.step_cost.params
  names = [f"sharded({axis!r}, ...)", f"presets.sdp4bit({axis!r}, ...)"]
  try:
    tx = transforms.sharded(axis, optimizer)
    try:
      plain = _trace_distinct(problem, tx)
    except (KeyError, TypeError, ValueError):
      # One that labels parameters takes the whole tree alone.
      plain = _trace_moves(problem, tx, tree)
  except (TypeError, ValueError) as error:
    note = f"It assumes an optimizer of single elements: {error}"
    yield from (_algorithm_choice.refuse_choice(name, note) for name in names)
  else:
    yield _weigh(problem, uncompressed, names[0], *plain, f"{_PARTS}.")
    # Bytes depend on shapes alone.
    tx = presets.sdp4bit(axis, optax.sgd(0.1))
    note = f"{_PARTS}; gradients and weights lose accuracy at 4 bits."
    coded = _trace_distinct(problem, tx)
    yield _weigh(problem, uncompressed, names[1], *coded, note)
  yield _algorithm_choice.refuse_choice(
    "presets.zeropp(...)",
    "It assumes a loss that gathers its blocks by `transforms.gather_block`.",
  )


def _trace_distinct(
  problem: _problem.ExchangeProblem, tx: optax.GradientTransformation
) -> tuple[ShardedOptions, wire.Ledger]:
  """Returns the moves of all parameters from those of one of each shape."""
  leaves = jax.tree.leaves(problem.step_cost.params)
  counts = collections.Counter((a.shape, a.dtype) for a in leaves)
  sent: dict[tuple[str, tuple[str, ...], int, str], int] = {}
  for leaf in problem.distinct_leaves.values():
    options, ledger = _trace_moves(problem, tx, leaf)
    for move in ledger.moves:
      kind = (move.op, move.axes, move.workers, move.dtype)
      nbytes = move.payload_bytes * move.count * counts[leaf.shape, leaf.dtype]
      sent[kind] = sent.get(kind, 0) + nbytes
  moves = [wire.Move(*kind, nbytes, 1) for kind, nbytes in sent.items()]
  return options, wire.Ledger(tuple(moves))


def _trace_moves(
  problem: _problem.ExchangeProblem,
  tx: optax.GradientTransformation,
  params: PyTree,
) -> tuple[ShardedOptions, wire.Ledger]:
  """Returns what an update of parameters sends."""
  mesh = _algorithm_choice.make_workers_mesh(problem)
  axes = mesh.axis_names
  state = trace_state(tx, params, mesh, axes)
  specs = core.state_specs(state, axes)

  def update(grads: PyTree, state: PyTree, params: PyTree) -> PyTree:
    own = jax.tree.map(lambda a: a[0], grads)
    return tx.update(own, state, params)

  run = jax.shard_map(
    update, mesh=mesh, in_specs=(P(axes), specs, P()), out_specs=(P(), specs)
  )
  grads = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct((mesh.size, *a.shape), a.dtype),
    params,
  )
  (exchange,) = find_exchanges(state)
  return exchange.made_for, wire.step_bytes(run, grads, state, params)


def _weigh(
  problem: _problem.ExchangeProblem,
  uncompressed: perfmodel.StepPrediction,
  name: str,
  options: ShardedOptions,
  ledger: wire.Ledger,
  note: str,
) -> _algorithm_choice.AlgorithmChoice:
  step_cost, device = problem.step_cost, problem.platform.device
  hosts, devices = problem.workers, problem.devices or 1
  workers = hosts * devices
  size = sum(a.size for a in jax.tree.leaves(step_cost.params))
  part = -(-size // workers)
  gradients = options.gradient_codec
  weights = options.weight_codec or codecs.identity()
  coding_s = encode_seconds(gradients, size // devices, device)
  coding_s += decode_seconds(gradients, part, hosts, device)
  coding_s += encode_seconds(weights, part, device)
  coding_s += decode_seconds(weights, size, 1, device)
  link_s = perfmodel.ledger_seconds(ledger, problem.platform)
  saved = 1 - 1 / workers
  base_s = (
    _algorithm_choice.unexchanged_seconds(uncompressed)
    - saved * uncompressed.update_s
  )
  needed = uncompressed.memory_bytes - saved * step_cost.state_bytes
  choice = _algorithm_choice.AlgorithmChoice(
    name, base_s + coding_s + link_s, ledger.total_bytes, note
  )
  return _algorithm_choice.offer_choice(problem, choice, needed)
