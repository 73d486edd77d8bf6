"""Generated codecs, held to the laws that they state.

A round draws some codecs with a shape and a dtype each. One program encodes and
decodes many arrays: extreme ones, equal ones, subnormal ones, arrays with NaN.
Then it wraps a codec in error memory for some steps, encodes a tree, and
compares a compiled call with one that is not.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.fuzz import codec_setups
from experiments.fuzz.rounds import Defect, Round
from jaxmotion import codecs, make_key, testing

# Arrays of one program; each is a case.
_ROWS = 126
_FEW_ROWS = 28
_STEPS = 6


def run_round(seed: int) -> Round:
  """Draws codecs and checks their laws."""
  rng = np.random.default_rng(seed)
  rounds = [check_laws(codec_setups.draw_setup(rng), seed) for _ in range(3)]
  setup = codec_setups.draw_setup(rng)
  rounds.append(check_memory(setup, seed))
  rounds.append(check_tree(codec_setups.draw_tree_codec(rng), seed))
  if seed % 4 == 0:
    rounds.append(check_eager(codec_setups.draw_codec(rng), seed))
  defects = itertools.chain.from_iterable(r.defects for r in rounds)
  return Round(sum(r.cases for r in rounds), tuple(defects))


def check_laws(
  setup: codec_setups.Setup, seed: int, count: int = _ROWS
) -> Round:
  """Checks every law that a codec states, on many arrays."""
  case = f"check_laws({setup!r}, {seed}, {count})"
  rows = codec_setups.draw_rows(setup, count, np.random.default_rng((seed, 1)))
  with _wide_floats(setup.dtype):
    breaches = testing.find_breaches(setup.codec, jnp.asarray(rows), seed=seed)
  found = [
    Defect(law, case, f"row {row}: {detail}") for law, row, detail in breaches
  ]
  return Round(len(rows), tuple(found))


def check_memory(setup: codec_setups.Setup, seed: int) -> Round:
  """Checks what error feedback sends and remembers over several steps."""
  case = f"check_memory({setup!r}, {seed})"
  rng = np.random.default_rng((seed, 2))
  decay = float(rng.choice((1.0, 0.75)))
  if not setup.codec.laws.bounds_memory:
    return _check_refusal(setup.codec, case)
  codec = codecs.feedback(setup.codec, decay=decay)
  rows = codec_setups.draw_rows(setup, _FEW_ROWS, rng)
  given = np.stack([np.roll(rows, step, 0) for step in range(_STEPS)])
  with _wide_floats(setup.dtype):
    left, sent = _run_memory(codec, jnp.asarray(given))
  before = np.concatenate([np.zeros_like(left[:1]), left[:-1]])
  found = []
  with np.errstate(all="ignore"):
    # The memory is float32, whatever the arrays are.
    value = given.astype(np.float32).astype(np.float64) + decay * before
    scale = np.abs(value) + np.abs(sent) + np.abs(decay * before)
    whole = np.isfinite(value.astype(np.float32)) & np.isfinite(sent)
    gap = np.abs(sent + left - value) - 2.0**-21 * scale - 1e-36
    # What is beyond float32 is forgotten.
    whole &= np.abs(value - sent) < 3.4e38
    lost = whole & ~(gap <= 0)
  if not np.isfinite(left).all():
    detail = f"{(~np.isfinite(left)).sum()} elements are not finite"
    found.append(Defect("the memory stays finite", case, detail))
  if lost.any():
    step, row = np.argwhere(lost)[0][:2]
    detail = f"step {step}, row {row}: off by {gap[lost].max()}"
    law = "sent and remembered is what came and was remembered"
    found.append(Defect(law, case, detail))
  return Round(_FEW_ROWS * _STEPS, tuple(found))


def _check_refusal(codec: codecs.Codec, case: str) -> Round:
  try:
    codecs.feedback(codec)
  except ValueError as error:
    if "`codec` must" in str(error):
      return Round(1)
  law = "a codec without bounded memory is refused by name"
  return Round(1, (Defect(law, case, repr(codec)),))


def _run_memory(codec: Any, given: jax.Array) -> tuple[np.ndarray, np.ndarray]:
  """Returns the error and what was sent of every step, as float64."""
  like = jax.ShapeDtypeStruct(given.shape[2:], jnp.float32)

  def run_steps(given: jax.Array, worker: jax.Array) -> Any:
    def step(state: Any, inputs: Any) -> Any:
      x, i = inputs
      key = make_key(i, worker)
      payload, state = codec.encode(x, state, key)
      return state, (codec.error(state), codec.decode(payload, like))

    steps = jnp.arange(_STEPS, dtype=jnp.uint32)
    return jax.lax.scan(step, codec.init(given[0]), (given, steps))[1]

  workers = jnp.arange(given.shape[1], dtype=jnp.uint32)
  run = jax.jit(jax.vmap(run_steps, (1, 0), 1))
  left, sent = run(given, workers)
  return np.asarray(left, np.float64), np.asarray(sent, np.float64)


def check_tree(codec: codecs.Codec, seed: int) -> Round:
  """Checks that a tree comes back leaf by leaf, within the stated error."""
  case = f"check_tree({codec!r}, {seed})"
  tree = codec_setups.draw_tree(np.random.default_rng((seed, 3)))

  @jax.jit
  def trip(tree: Any, key: Any) -> Any:
    payload, _ = codec.encode(tree, codec.init(tree), key)
    return codec.decode(payload, tree)

  decoded = trip(tree, make_key(seed))
  peak = max(np.abs(a.astype(float)).max(initial=0) for a in tree.values())
  found = []
  for name, x in tree.items():
    y = np.asarray(decoded[name])
    if (y.shape, y.dtype) != (x.shape, x.dtype):
      detail = f"{name}: {x.dtype}{x.shape} became {y.dtype}{y.shape}"
      found.append(Defect("leaves keep shape and dtype", case, detail))
      continue
    error = codec.laws.error
    # What a codec of limited capacity drops is seen only in its payload.
    if error is None or _may_drop(codec):
      continue
    exact, off = np.abs(x.astype(float)), np.abs(y.astype(float) - x)
    bound = error.relative * exact + error.peak * peak + error.floor
    bound = bound * (1 + 1e-6) + float(jnp.finfo(x.dtype).eps) * np.abs(y)
    if not (off <= bound + 1e-7).all():
      detail = f"{name}: off by {off.max()}"
      found.append(Defect("leaves come back within the bound", case, detail))
  return Round(len(tree), tuple(found))


def _may_drop(codec: Any) -> bool:
  return any(word in repr(codec) for word in ("threshold(", "zero_value("))


def check_eager(codec: codecs.Codec, seed: int) -> Round:
  """Checks that a call decodes to the same array whether compiled or not."""
  case = f"check_eager({codec!r}, {seed})"
  x = jnp.asarray(
    np.random.default_rng((seed, 4)).normal(size=(5, 13)), jnp.float32
  )

  def trip(x: Any, key: Any) -> Any:
    payload, _ = codec.encode(x, codec.init(x), key)
    return codec.decode(payload, x)

  key = make_key(seed)
  eager, compiled = np.asarray(trip(x, key)), np.asarray(jax.jit(trip)(x, key))
  # Sums differ in their last bits, and what is rounded after them by a step.
  adds_up = any(word in repr(codec) for word in ("rotate", "sign", "ternary"))
  peak = np.abs(compiled).max()
  off = np.abs(eager - compiled)
  same = (off > 1e-5 * peak).mean() < 0.1 if adds_up else not off.any()
  if same:
    return Round(1)
  law = "a compiled call decodes to the same array"
  return Round(1, (Defect(law, case, f"off by {off.max()}"),))


@contextlib.contextmanager
def _wide_floats(dtype: str) -> Iterator[None]:
  """Allows float64 where it is needed."""
  if dtype != "float64":
    yield
    return
  with jax.enable_x64(True):
    yield
