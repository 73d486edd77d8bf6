"""Islands over HTTP, on the S3 server of moto."""

import functools
import time
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import obstore.store
import optax
import pytest

from jaxmotion import codecs, islands
from jaxmotion.islands._store import Object, Store
from tests.islands.test_island import assert_same_bits, run_all

server = pytest.importorskip("moto.server", reason="moto[server] is missing")


def open_bucket(endpoint, prefix):
  """Makes the bucket of a server, and opens a prefix of it."""
  urllib.request.urlopen(
    urllib.request.Request(f"{endpoint}/bucket", method="PUT")
  )
  return obstore.store.S3Store(
    "bucket",
    prefix=prefix,
    endpoint=endpoint,
    access_key_id="key",
    secret_access_key="secret",
    region="us-east-1",
    client_options={"allow_http": True},
    retry_config={"max_retries": 1},
  )


@pytest.fixture(scope="module")
def open_run():
  """Opens a prefix of a bucket."""
  running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
  running.start()
  host, port = running.get_host_and_port()
  yield functools.partial(open_bucket, f"http://{host}:{port}")
  running.stop()


def test_one_writer_wins(open_run):
  store, name = Store(open_run("one"), 1 << 20), Object("commit", 1)
  assert store.create(name, b"first")
  assert not store.create(name, b"second")
  assert store.read(name) == b"first"
  assert [*store.list().marks] == [name]
  store.delete([name, name])
  assert store.read(name) is None


def test_islands_agree_over_http(open_run):
  params = {"w": jnp.zeros(50), "b": jnp.zeros((3, 4))}
  members = [
    islands.join(
      open_run("runs/7"),
      params,
      optax.sgd(0.7, momentum=0.9),
      codec=codecs.feedback(codecs.uniform(bits=4)),
      every=2,
      name=f"island{i}",
      quorum=3,
    )
    for i in range(3)
  ]

  def train(i):
    rng, own = np.random.default_rng(i), members[i].start()
    for _ in range(24):
      own = jax.tree.map(
        lambda p: p + rng.normal(size=p.shape).astype(np.float32), own
      )
      own = members[i].step(own)
    return members[i].anchor

  anchors = run_all([lambda i=i: train(i) for i in range(3)])
  for member, anchor in zip(members, anchors, strict=True):
    assert member.round == 12
    assert_same_bits(anchor, anchors[0])
    member.stop()
  kinds = {
    name.kind for name in Store(open_run("runs/7"), 1 << 20).list().marks
  }
  assert kinds == {"contribution", "commit", "snapshot"}


def test_a_server_that_goes_away_stops_no_training(caplog):
  running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
  running.start()
  host, port = running.get_host_and_port()
  store = open_bucket(f"http://{host}:{port}", "outage")
  island = islands.join(
    store, jnp.zeros(9), optax.sgd(1.0), codec=codecs.sign(), every=1
  )
  params = island.start()
  for _ in range(3):
    params = island.step(params + 1)
  round = island.round
  running.stop()
  for _ in range(5):
    params = island.step(params + 1)
  assert "trains on by itself" in caplog.text
  assert island.round <= round + 1
  # Its buckets are those of the process.
  running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=port)
  running.start()
  deadline = time.monotonic() + 60
  while island.round < round + 3:
    params = island.step(params + 1)
    time.sleep(0.1)
    assert time.monotonic() < deadline
  assert "follows the run again" in caplog.text
  island.stop()
  running.stop()
