"""Stores: one writer wins, names stay in the prefix, errors tell no secrets."""

import logging
import sys
import threading

import jax.numpy as jnp
import obstore.store
import optax
import pytest

from jaxmotion import codecs, islands
from jaxmotion.islands._store import Object, Store

SECRETS = ["AKIDEXAMPLE", "verysecretvalue"]


def open_stores(tmp_path):
  yield Store(tmp_path / "a folder" / "run", 1 << 20)
  yield Store(obstore.store.MemoryStore(), 1 << 20)


@pytest.mark.parametrize("kind", [0, 1])
def test_one_of_many_writers_wins(kind, tmp_path):
  store, name = [*open_stores(tmp_path)][kind], Object("commit", 3)
  won = []

  def write(i):
    if store.create(name, bytes([i]) * 1000):
      won.append(i)

  threads = [threading.Thread(target=write, args=(i,)) for i in range(16)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len(won) == 1
  assert store.read(name) == bytes(won) * 1000
  assert not store.create(name, b"later")


@pytest.mark.parametrize("kind", [0, 1])
def test_objects_are_listed_and_deleted_any_number_of_times(kind, tmp_path):
  store = [*open_stores(tmp_path)][kind]
  names = [Object("contribution", 12, "a-b_C"), Object("snapshot", 10)]
  for name in names:
    store.create(name, b"x")
  (tmp_path / "a folder" / "run" / "contribution.12.b").touch()
  assert set(store.list().marks) == set(names)
  assert store.list().contributors(12) == ["a-b_C"]
  store.delete(names * 2)
  assert store.list().marks == {}
  assert store.read(names[0]) is None


def test_a_lease_that_is_written_again_has_another_mark(tmp_path):
  for store in open_stores(tmp_path):
    name, marks = Object("lease", 0, "a"), set()
    for i in range(3):
      store.write(name, str(i).encode())
      marks.add(store.list().marks[name])
    assert len(marks) == 3


@pytest.mark.parametrize("name", ["", "a/b", "..", "a.b", "ä", "a" * 65, "a\n"])
def test_names_that_could_leave_the_prefix_are_refused(name, tmp_path):
  with pytest.raises(ValueError, match="`name` must be 1 to 64"):
    islands.join(
      tmp_path,
      jnp.zeros(3),
      optax.sgd(1.0),
      codec=codecs.identity(),
      every=1,
      name=name,
    )
  assert not [*tmp_path.iterdir()]


def test_errors_of_a_store_tell_no_secrets(caplog):
  caplog.set_level(logging.DEBUG)
  store = obstore.store.S3Store(
    "bucket",
    endpoint="http://127.0.0.1:9",
    access_key_id=SECRETS[0],
    secret_access_key=SECRETS[1],
    region="eu",
    client_options={"allow_http": True, "timeout": "1s"},
    retry_config={"max_retries": 0},
  )
  with pytest.raises(islands.StoreError) as caught:
    Store(store, 1 << 20).list()
  shown = f"{caught.value!r} {caught.getrepr()} {caplog.text}"
  assert not any(secret in shown for secret in SECRETS)
  with pytest.raises(ValueError, match="`store` must be") as refused:
    Store(f"s3://{SECRETS[0]}:{SECRETS[1]}@/x?y", 1 << 20)
  shown = f"{refused.value!r} {refused.getrepr()}"
  assert not any(secret in shown for secret in SECRETS)


def test_a_missing_extra_is_named(monkeypatch, tmp_path):
  monkeypatch.setitem(sys.modules, "obstore", None)
  with pytest.raises(ImportError, match=r"jaxmotion\[islands\]"):
    Store(tmp_path, 1 << 20)


def test_a_run_of_another_model_or_codec_is_refused(tmp_path):
  make = lambda params, codec: islands.join(
    tmp_path, params, optax.sgd(1.0), codec=codec, every=1
  )
  make(jnp.zeros(3), codecs.identity())
  with pytest.raises(islands.MessageError, match="snapshot.00000000 is refus"):
    make(jnp.zeros(4), codecs.identity())
  with pytest.raises(islands.MessageError, match="its codec is"):
    make(jnp.zeros(3), codecs.sign())


@pytest.mark.parametrize(
  "codec",
  [codecs.low_rank(rank=1), codecs.feedback(codecs.sign(), form="global")],
)
def test_codecs_that_need_other_workers_are_refused(codec, tmp_path):
  with pytest.raises(ValueError, match="`codec` must be"):
    islands.join(
      tmp_path, jnp.zeros((3, 4)), optax.sgd(1.0), codec=codec, every=1
    )
