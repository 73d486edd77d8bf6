"""Exchanges and collectives that are timed on hosts, and their workers."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from experiments.common import names
from experiments.hosts import torch_worker
from experiments.train import cases, presets
from experiments.train.cases import EXCHANGES as EXCHANGES

_CASE = re.compile(r"carry_(\w+)_(\d+)kib")
_AXIS = "data"


def _shift_rows(words: jax.Array, hosts: int) -> Any:
  """Sends what an all-to-all does, in turns of one row to one host."""
  rows = words.reshape(hosts, -1)
  index = lax.axis_index(_AXIS)
  received = [lax.dynamic_index_in_dim(rows, index, keepdims=False)]
  for turn in range(1, hosts):
    to = lax.rem(index + turn, hosts)
    sent = lax.dynamic_index_in_dim(rows, to, keepdims=False)
    # The turns follow one another.
    sent = sent + jnp.minimum(received[-1][:1] >> 1, 0)
    pairs = [(i, (i + turn) % hosts) for i in range(hosts)]
    received.append(lax.ppermute(sent, _AXIS, pairs))
  return jnp.stack(received)


# Function, and the bytes that a host has for each byte that it sends.
CARRIERS: dict[str, tuple[Callable[..., Any], Callable[[int], float]]] = {
  "sum": (
    lambda words, hosts: lax.psum(words, _AXIS),
    lambda hosts: hosts / (2 * (hosts - 1)),
  ),
  "gather": (
    lambda words, hosts: lax.all_gather(words, _AXIS),
    lambda hosts: 1 / (hosts - 1),
  ),
  "alltoall": (
    lambda words, hosts: lax.all_to_all(words.reshape(hosts, -1), _AXIS, 0, 0),
    lambda hosts: hosts / (hosts - 1),
  ),
  "shifts": (_shift_rows, lambda hosts: hosts / (hosts - 1)),
}
"""Kinds of collectives by name."""


def is_carrier(case: str) -> bool:
  """Says whether a case is a collective alone."""
  found = _CASE.fullmatch(case)
  return found is not None and found[1] in CARRIERS


def make_carrier(mesh: Mesh, case: str) -> tuple[Callable[..., Any], Any]:
  """Makes a collective and what each host gives to it."""
  found = _CASE.fullmatch(case)
  assert found is not None
  carry, share = CARRIERS[found[1]]
  hosts = mesh.size
  count = int(share(hosts) * int(found[2]) * 1024 / 4) // hosts * hosts
  own = np.tile(np.arange(count, dtype=np.uint32), (len(mesh.local_devices), 1))

  def send(words: jax.Array) -> Any:
    return jax.tree.map(lambda a: a[None], carry(words[0], hosts))

  run = jax.shard_map(
    send, mesh=mesh, in_specs=P(_AXIS), out_specs=P(_AXIS), check_vma=False
  )
  sharding = NamedSharding(mesh, P(_AXIS))
  words = jax.make_array_from_process_local_data(sharding, own)
  return jax.jit(run), words


EXCHANGE_CASES = ("none", *cases.EXCHANGES)
"""Names of the default cases of jaxmotion; `none` exchanges nothing."""

LOCAL_CASES: dict[str, dict[str, Any]] = {
  "diloco8_fp32": {"every": 8},
  "diloco8_int4": {"every": 8, "codec": cases.EXCHANGES["int4_feedback"]},
  "streaming8_int4": {
    "every": 8,
    "fragments": 4,
    "delay": 1,
    "codec": cases.EXCHANGES["int4_feedback"],
  },
}
"""Options of `local_updates` by name of the case; a step is a mean of 8."""

ONE_PROGRAM = "one_program_"
"""Prefix of an exchange that does not overlap with its own step."""

PEER_CASES = tuple(torch_worker.CASES)
"""Names of the cases of PyTorch."""

EXCHANGE_WORKER = "experiments.hosts.jax_worker"
PEER_WORKER = "experiments.hosts.torch_worker"


def check_case(case: str) -> str:
  """Returns the name of a case if there is one of this name."""
  exchanges = (*cases.EXCHANGES, *cases.SHARDED, *presets.PRESETS)
  if is_carrier(case) or cases.undelayed_name(
    case.removeprefix(ONE_PROGRAM)
  ) in (exchanges):
    return case
  names.check_name(case, ("none", *LOCAL_CASES, *exchanges))
  return case
