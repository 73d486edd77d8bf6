"""Links that carry activations forth and their gradients back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmotion import codecs, collectives, make_key, wire
from jaxmotion.collectives import _transport
from tests.collectives.helpers import over, run

X = np.random.default_rng(2).normal(size=(4, 8, 32)).astype(np.float32)
STAGES = [(0, 1), (1, 2), (2, 3)]
INT8 = codecs.uniform(bits=8, block=32)
ROTATED = codecs.chain(
  codecs.rotate(block=32),
  codecs.uniform(bits=4, block=32, rounding="stochastic"),
)
PLAIN = {
  "all_to_all": lambda x: lax.all_to_all(x, "data", 0, 1, tiled=True),
  "permute": lambda x: lax.ppermute(x, "data", STAGES),
}
LINKS = pytest.mark.parametrize("link", PLAIN)


def send(link, x, codec=None, backward=None):
  key = make_key(0, lax.axis_index("data"))
  if link == "permute":
    return collectives.permute(
      x, "data", STAGES, codec, backward=backward, key=key
    )
  return collectives.all_to_all(
    x, "data", codec, backward=backward, key=key, concat_axis=1
  )[0]


def loss_and_gradient(fn):
  def both(x):
    def loss(x):
      y = fn(x)
      scale = 1.0 + lax.axis_index("data")
      return jnp.sum(jnp.sin(y) * scale), y

    (_, y), grad = jax.value_and_grad(loss, has_aux=True)(x)
    return y, grad

  return both


def results(fn):
  return run(loss_and_gradient(fn), X, 4, (P("data"), P("data")))


@LINKS
def test_each_direction_has_its_own_codec(link):
  y, grad = results(PLAIN[link])
  full = results(lambda x: send(link, x, backward=codecs.identity()))
  for a, b in zip(full, (y, grad), strict=True):
    np.testing.assert_array_equal(a, b)
  forth, back = results(lambda x: send(link, x, INT8, ROTATED))
  for found, exact, bound in ((forth, y, 0.01), (back, grad, 0.2)):
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < bound
  if link == "permute":  # A worker without a source gets zeros.
    assert not np.any(forth[:8]) and np.any(forth[8:])
    assert not np.any(back[24:]) and np.any(back[:24])


@LINKS
def test_both_directions_send_payloads(link):
  def count(fn):
    program = over(lambda x: loss_and_gradient(fn)(x)[1], 4, P("data"))
    return wire.step_bytes(program, X).total_bytes

  # A stage sends its array; of four slices a worker keeps one.
  piece, sends = (X[0], 1) if link == "permute" else (X[0, :2], 3)
  forth, back = (wire.payload_bytes(c, piece) for c in (INT8, ROTATED))
  assert count(PLAIN[link]) == sends * 2 * piece.nbytes
  found = count(lambda x: send(link, x, INT8, ROTATED))
  assert found == sends * (forth + back)
  assert count(lambda x: send(link, x, INT8)) == sends * (forth + piece.nbytes)
  assert forth + back < piece.nbytes


@pytest.mark.parametrize("workers", [3, 5])
def test_large_rows_of_odd_numbers_of_workers_travel_in_turns(
  workers, monkeypatch
):
  monkeypatch.setattr(_transport, "_MIN_TURNS_BYTES", 1 << 10)
  x = np.random.default_rng(0).random((workers, 8 * workers, 64), np.float32)
  ours, plain = (
    over(lambda x, fn=fn: fn(x)[None], workers, P("data"))
    for fn in (functools.partial(send, "all_to_all"), PLAIN["all_to_all"])
  )
  np.testing.assert_array_equal(ours(x), plain(x))
  compiled = wire.compiled_bytes(ours.lower(x).compile())
  assert {move.op for move in compiled.moves} == {"collective_permute"}
  traced, sent = wire.step_bytes(ours, x), wire.step_bytes(plain, x)
  assert traced.total_bytes == compiled.total_bytes == sent.total_bytes


def test_pairs_that_are_no_transfers_are_refused():
  twice = [(0, 1), (0, 2)], [(0, 1), (2, 1)]
  for pairs in ([], *twice, [(0, 4)], [(0,)], "0,1"):
    call = lambda x, pairs=pairs: collectives.permute(x, "data", pairs)
    with pytest.raises(ValueError, match="`pairs` must be"):
      run(call, X, 4, P("data"))
