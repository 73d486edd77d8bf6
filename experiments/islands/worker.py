"""Island on one host, whose inner steps sleep; links.py starts it."""

import argparse
import hashlib
import json
import time
import urllib.request
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import obstore.store
import optax

from experiments.hosts import links
from jaxmotion import codecs, core, islands

_PARAMS = {f"w{i}": (1000, 1000) for i in range(10)}
_WARM_UP_ROUNDS, _MORE_ROUNDS = 1, 3


def open_bucket(address: str, timeout: str) -> obstore.store.S3Store:
  """Waits for the server, makes its bucket, and opens it."""
  endpoint = f"http://{address}"
  for _ in range(300):
    try:
      request = urllib.request.Request(f"{endpoint}/bucket", method="PUT")
      urllib.request.urlopen(request, timeout=10)
      break
    except OSError:
      time.sleep(0.2)
  return obstore.store.S3Store(
    "bucket",
    endpoint=endpoint,
    access_key_id="key",
    secret_access_key="secret",
    region="us-east-1",
    client_options={"allow_http": True, "timeout": timeout},
    retry_config={"max_retries": 1},
  )


def _count_wire_bytes(interface: str) -> int:
  """Returns the bytes that were sent so far, without headers of packets."""
  sent, packets = links.count_sent(interface)
  return sent - links.HEADER_BYTES * packets


def hash_arrays(tree: Any) -> str:
  """Returns the SHA-256 of the bits of all arrays."""
  digest = hashlib.sha256()
  for leaf in jax.tree.leaves(tree):
    digest.update(np.asarray(leaf).tobytes())
  return digest.hexdigest()


def main() -> None:
  """Trains some rounds, and prints times and bytes as JSON."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--server")
  parser.add_argument("--name")
  parser.add_argument("--interface")
  for name in ("every", "delay", "fragments", "step_ms", "rounds"):
    parser.add_argument(f"--{name}", type=int)
  arguments = parser.parse_args()
  jax.config.update("jax_platforms", "cpu")
  params = {name: jnp.zeros(shape) for name, shape in _PARAMS.items()}
  codec = codecs.feedback(codecs.uniform(bits=4))
  island = islands.join(
    # A snapshot takes longer than the 30 s of the default.
    open_bucket(arguments.server, timeout="300s"),
    params,
    optax.sgd(0.7),
    codec=codec,
    every=arguments.every,
    fragments=arguments.fragments,
    delay=arguments.delay,
    name=arguments.name,
    quorum=2,
  )
  move = jax.jit(lambda tree: jax.tree.map(lambda p: p + 1e-3, tree))
  params = island.start()
  # Between two steps that send, so that each fragment is sent equally often.
  phase = arguments.every // arguments.fragments // 2
  measured = arguments.rounds * arguments.every
  count_bytes = lambda: _count_wire_bytes(arguments.interface)
  inner_s, begin, sent, steps, first = 0.0, 0.0, 0, 0, None
  report: dict[str, Any] = {}
  # The other island begins in another round, and needs this one's changes.
  while island.round < _WARM_UP_ROUNDS + arguments.rounds + _MORE_ROUNDS:
    is_warm = island.round >= _WARM_UP_ROUNDS
    if first is None and is_warm and steps % arguments.every == phase:
      first, inner_s = steps, 0.0
      begin, sent = time.perf_counter(), count_bytes()
    if first is not None and steps == first + measured:
      seconds = time.perf_counter() - begin
      report = {
        "utilization": inner_s / seconds,
        "round_s": seconds / arguments.rounds,
        "wire_bytes": (count_bytes() - sent) / arguments.rounds,
      }
    start = time.perf_counter()
    time.sleep(arguments.step_ms / 1e3)
    params = jax.block_until_ready(move(params))
    inner_s += time.perf_counter() - start
    params = island.step(params)
    steps += 1
  likes = [codec.payload_like(p) for p in jax.tree.leaves(params)]
  report |= {
    "predicted_bytes": core.tree_bytes(likes),
    "anchor": hash_arrays(island.anchor),
  }
  print(json.dumps(report), flush=True)
  input()  # The other may need this one's change and lease.
  island.stop()


if __name__ == "__main__":
  main()
