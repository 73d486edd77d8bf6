import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from jaxmotion import codecs, memory, wire
from tests.compilations import compilations
from tests.memory.helpers import (
  DEVICE,
  HOST,
  PLAIN,
  SGD,
  WIDTH,
  batch_of,
  block,
  copy_tree,
  make_update,
  model_of,
  params_of,
  record_first_step,
  record_step,
  stages_of,
  tree_bits,
  whole_loss,
)

CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
LEVELS = (
  codecs.truncate(bytes=1),
  codecs.uniform(bits=8),
  codecs.truncate(bytes=2, rounding="nearest"),
)


def train(model, steps=4, level=0, params=None):
  state = model.init(params_of() if params is None else params)
  for i in range(steps):
    state, loss = model.step(state, batch_of(i), level)
  return state, loss


def plain_training(tx, steps=4):
  params = jax.tree.map(jnp.asarray, params_of())
  opt_state = tx.init(params)
  value_and_grad = jax.jit(jax.value_and_grad(whole_loss))
  update = make_update(tx)
  for i in range(steps):
    loss, grads = value_and_grad(params, batch_of(i))
    params, opt_state = update(params, opt_state, grads)
  return params, opt_state, loss


@pytest.mark.parametrize("is_staged", [True, False])
def test_without_compression_it_is_plain_training_bit_for_bit(is_staged):
  params, opt_state, loss = plain_training(CLIPPED)
  options = {"min_leaf_size": WIDTH + 1, "device": DEVICE, **PLAIN}
  stages = stages_of() if is_staged else whole_loss
  state, found = train(memory.HostResident(stages, CLIPPED, **options))
  assert tree_bits(state.params) == tree_bits(params)
  assert tree_bits(state.opt_state) == tree_bits(opt_state)
  assert tree_bits(found) == tree_bits(loss)
  assert int(state.step) == 4


def test_updating_each_stage_alone_or_streaming_changes_nothing():
  kept, loss = train(model_of(**PLAIN))
  alone, _ = train(model_of(update="per_stage", **PLAIN))
  streamed, found = train(model_of(stream_weights=True, **PLAIN))
  # Other programs may round otherwise.
  close = functools.partial(np.testing.assert_allclose, atol=1e-5)
  jax.tree.map(close, alone.params, kept.params)
  jax.tree.map(close, (found, streamed.params), (loss, kept.params))
  assert len(alone.opt_state) == len(stages_of())
  # The weights are sent twice.
  assert streamed.sent_bytes == 2 * kept.sent_bytes
  assert streamed.returned_bytes == kept.returned_bytes


def test_state_is_on_the_host_and_references_on_the_device():
  params = params_of()
  before = copy_tree(params)
  grads = codecs.feedback(codecs.uniform(bits=4))
  model = model_of(send_difference=True, grads=grads)
  state, loss = train(model, steps=1, params=params)

  def devices(tree):
    return {d for a in jax.tree.leaves(tree) for d in a.devices()}

  for tree in (state.params, state.opt_state, state.reference):
    assert devices(tree) == {HOST}
  for tree in (state.device_reference, state.grad_state, loss):
    assert devices(tree) == {DEVICE}
  # `init` copies the parameters.
  assert tree_bits(params) == tree_bits(before)


@pytest.mark.parametrize("send_difference", [False, True])
def test_counted_bytes_are_those_of_the_buffers_that_moved(send_difference):
  model = model_of(weights=LEVELS, send_difference=send_difference)
  params = params_of()
  state, seen = record_step(model, model.init(params), batch_of(), [0, 1, 2])

  def moved(name):
    return sum(
      a.nbytes
      for op_name, _, out in seen
      if op_name == name
      for a in jax.tree.leaves(out)
    )

  assert state.sent_bytes == moved("send")
  assert state.returned_bytes == moved("return")
  biases = 2 * 4 * WIDTH
  matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
  encoded = sum(wire.payload_bytes(codec, matrix) for codec in LEVELS)
  assert state.sent_bytes == biases + encoded
  encoded = wire.payload_bytes(codecs.uniform(bits=8), matrix)
  assert state.returned_bytes == biases + 3 * encoded
  assert model.plain_bytes(params) == biases + 3 * 4 * WIDTH**2
  state, _ = model.step(state, batch_of(), [0, 1, 2])
  assert state.sent_bytes == 2 * moved("send")


def test_the_device_computes_with_decoded_weights():
  """Here the leading byte of each element, biases as they are (A2DTWP)."""
  _, seen = record_first_step(weights=codecs.truncate(bytes=1))
  received = [args[1] for name, args, _ in seen if name == "forward"]
  # `forward` is given (function, params, ...), stage by stage.
  for weights, tree in zip(received, params_of().values(), strict=True):
    expected = tree["w"].view(np.uint32) & np.uint32(0xFF000000)
    found = np.asarray(weights["w"]).view(np.uint32)
    np.testing.assert_array_equal(found, expected)
    if "b" in tree:
      np.testing.assert_array_equal(weights["b"], tree["b"])


def test_a_level_change_compiles_encoding_and_decoding_only():
  # Codecs of no other test, so that nothing is compiled before.
  levels = [
    codecs.uniform(bits=bits, block=96, symmetric=False) for bits in (3, 5, 7)
  ]
  model = model_of(blocks=2, weights=levels)
  state = model.init(params_of(blocks=2))

  def step(level):
    nonlocal state
    before = compilations()
    state, _ = model.step(state, batch_of(), level)
    return compilations() - before

  step(0)
  assert step(0) == 0
  # All matrices have one shape: one program encodes them, one decodes them.
  assert step([0, 1, 0, 0]) == 2
  assert step([0, 1, 1, 1]) == 0
  assert step(jnp.int32(2)) == 2
  assert step([2, 0, 1, 0]) == 0


def test_stages_with_one_function_share_programs():
  def middle(params, x, batch):
    return jnp.sin(block(params, x, batch))

  def compiled(blocks):
    (begin, *_, end), names = stages_of(), [f"block{i}" for i in range(blocks)]
    stages = [begin, *((name, middle) for name in names), end]
    model = memory.HostResident(
      stages, SGD, update="per_stage", min_leaf_size=64
    )
    state = model.init(params_of(blocks))
    before = compilations()
    model.step(state, batch_of())
    return compilations() - before

  # The blocks' forward and backward passes and the updates, at least.
  assert compiled(2) >= 3
  assert compiled(9) == 0


def test_norms_and_errors_are_those_of_each_group():
  model = model_of(weights=LEVELS)
  params = params_of()
  state = model.init(params)
  assert model.groups_of(params).names == ("first", "block0", "last")
  names = model.groups_of(params).names
  norms = [np.linalg.norm(params[n]["w"]) for n in names]
  np.testing.assert_allclose(model.norms(state), norms, rtol=1e-6)
  errors = []
  for name, codec in zip(names, LEVELS, strict=True):
    w = params[name]["w"]
    sent = jax.jit(lambda w, c=codec: c.decode(c.encode(w)[0], w))(w)
    errors.append(np.linalg.norm(sent - w) / np.linalg.norm(w))
  np.testing.assert_allclose(model.errors(state, [0, 1, 2]), errors, rtol=1e-4)


def test_what_gradients_lost_returns_with_the_next_ones():
  gradient = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
  start, steps = np.zeros_like(gradient), 8

  def missing(grads):
    """Returns how far the weights are from where all gradients lead."""
    model = memory.HostResident(
      lambda w, batch: jnp.sum(w * batch), optax.sgd(1.0), grads=grads
    )
    state = model.init(start)
    for _ in range(steps):
      state, _ = model.step(state, gradient)
    return np.linalg.norm(state.params + steps * gradient)

  int4 = codecs.uniform(bits=4)
  # A payload leaves one rounding out. Without feedback all steps do.
  assert missing(codecs.feedback(int4)) < missing(int4) / (steps / 2)


def test_rules_make_groups_and_exclude_leaves():
  rules = [("last", None), ("first|block", "body")]
  model = model_of(groups=rules, min_leaf_size=0)
  params = params_of()
  groups = model.groups_of(params)
  assert groups.names == ("body",)
  assert groups.of_leaf == (0, 0, 0, 0, None)
  state, _ = train(model, steps=1)
  encoded = [params["first"], params["block0"]]
  expected = wire.payload_bytes(codecs.uniform(bits=8), encoded)
  assert state.sent_bytes == expected + 4 * WIDTH**2


def test_a_restored_state_continues_bit_for_bit(tmp_path):
  model = model_of(
    weights=codecs.uniform(bits=4, rounding="stochastic"),
    grads=codecs.feedback(codecs.uniform(bits=4)),
    send_difference=True,
    update="per_stage",
  )
  state, _ = train(model, steps=2)
  saved = copy_tree(state)
  shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
  with ocp.StandardCheckpointer() as saver:
    saver.save(tmp_path / "state", state)
    saver.wait_until_finished()
    restored = [saver.restore(tmp_path / "state", t) for t in (saved, shapes)]
  expected, _ = model.step(state, batch_of(3))
  for one in (saved, *restored):
    assert tree_bits(one) == tree_bits(saved)
    assert jax.tree.structure(one) == jax.tree.structure(state)
    found, _ = model.step(model.place_state(one), batch_of(3))
    assert tree_bits(found) == tree_bits(expected)
    assert found.sent_bytes.dtype == np.int64 and int(found.step) == 3


def test_rounding_depends_on_seed_step_and_stage():
  codec = codecs.uniform(bits=4, rounding="stochastic")
  same = np.random.default_rng(0).normal(size=(WIDTH, WIDTH))
  params = params_of()
  params["first"]["w"] = params["last"]["w"] = same.astype(np.float32)

  def first_payloads(seed):
    model = model_of(weights=codec, tx=optax.sgd(0.0), seed=seed)
    state, seen = record_step(model, model.init(params), batch_of())
    _, more = record_step(model, state, batch_of())
    outs = [out for name, _, out in seen + more if name == "pack"]
    first, _, last, second_step, _, _ = [
      "".join(map(str, tree_bits(out)))
      for out in outs
      if type(out[0]).__name__ == "Symmetric"
    ]
    return first, last, second_step

  first, last, second_step = first_payloads(0)
  assert len({first, last, second_step, first_payloads(1)[0]}) == 4
  assert first_payloads(0) == (first, last, second_step)


class Net(nnx.Module):
  """A network with batch norm and dropout."""

  def __init__(self, rngs):
    self.first = nnx.Linear(16, 8, rngs=rngs)
    self.norm = nnx.BatchNorm(8, rngs=rngs)
    self.drop = nnx.Dropout(0.2, rngs=rngs)

  def __call__(self, x):
    return self.drop(nnx.relu(self.norm(self.first(x))))


def test_batch_statistics_and_dropout_are_those_of_plain_training():
  graph, params, stats = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

  def loss_fn(params, stats, batch):
    net = nnx.merge(graph, params, stats)
    return jnp.mean(net(batch) ** 2), nnx.split(net, nnx.Param, ...)[2]

  tx = optax.sgd(0.1, momentum=0.9)
  model = memory.HostResident(loss_fn, tx, stateful=True, **PLAIN)
  state = model.init(params, stats)

  @jax.jit
  def grads_of(params, stats, batch):
    def loss(params):
      return loss_fn(params, jax.tree.map(lambda a: a, stats), batch)

    return jax.value_and_grad(loss, has_aux=True)(params)

  update, opt_state, seen = make_update(tx), tx.init(params), []
  for batch in np.random.default_rng(0).normal(size=(3, 4, 16)):
    state, loss = model.step(state, batch)
    (expected, stats), grads = grads_of(params, stats, batch)
    params, opt_state = update(params, opt_state, grads)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    seen.append(float(loss))
  assert len(set(seen)) == 3
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
    (state.params, nnx.filter_state(state.stats[0], nnx.BatchStat)),
    (params, nnx.filter_state(stats, nnx.BatchStat)),
  )


def test_each_stage_has_its_stats_with_and_without_streaming():
  def count(params, stats, x, batch):
    x = batch if x is None else x
    return x * params["w"], {"calls": stats["calls"] + 1}

  def loss(params, stats, x, batch):
    return jnp.sum(x), stats

  stages = [("a", count), ("b", count), ("loss", loss)]
  w = {"w": np.ones(2, np.float32)}
  params = {"a": w, "b": w, "loss": {}}
  stats = {"a": {"calls": np.int32(0)}, "b": {"calls": np.int32(5)}}
  for stream_weights in (False, True):
    model = memory.HostResident(
      stages, optax.sgd(0.1), stateful=True, stream_weights=stream_weights
    )
    state = model.init(params, stats)
    for _ in range(3):
      state, _ = model.step(state, np.ones(2, np.float32))
    counts = [s["calls"] for s in state.stats if s]
    assert list(map(int, counts)) == [3, 8]


FEEDBACK = codecs.feedback(codecs.uniform(bits=8))
OF_TREES = codecs.rules([(".*", codecs.identity())])


def init_with(**changes):
  """Initializes parameters of which those of some stages differ."""
  return model_of().init({**params_of(), **changes})


def init_groups(*rules):
  return model_of(groups=rules).init(params_of())


def step_stages(*functions):
  stages = [*zip("ab", functions, strict=True)]
  model = memory.HostResident(stages, SGD, min_leaf_size=0)
  params = {"a": {"w": np.ones((2, 2), np.float32)}, "b": {}}
  model.step(model.init(params), np.ones(2, np.float32))


ERRORS = {
  "`stream_weights` must be": lambda: model_of(
    send_difference=True, stream_weights=True
  ),
  "from fewest to most bytes": lambda: model_of(weights=LEVELS[::-1]),
  "codecs without state": lambda: model_of(weights=FEEDBACK),
  "different names": lambda: memory.HostResident([("a", block)] * 2, SGD),
  r"stages \['block0', 'first', 'last'\]": lambda: init_with(other={}),
  "`stats` must be None unless": lambda: model_of().init(params_of(), {"a": 1}),
  "stages among": lambda: model_of(stateful=True).init(params_of(), {"c": 1}),
  "match a leaf each, got 'attention'": lambda: init_groups(
    ("attention", "a"), ("", None)
  ),
  "must cover every leaf, got 'block0/b'": lambda: init_groups(("first", "a")),
  "got 'biases', which has none": lambda: init_groups(
    ("b$", "biases"), ("", "rest")
  ),
  r"scalar loss, got float32\[2\]": lambda: step_stages(
    lambda p, x, b: p["w"] @ b, lambda p, x, b: x
  ),
  "`grads` must be a codec of arrays": lambda: model_of(grads=OF_TREES),
  "pairs of a name and a func": lambda: memory.HostResident([("a", 1)], SGD),
  "float32 .* at 'last/w'": lambda: init_with(
    last={"w": np.ones((WIDTH, WIDTH), np.int32)}
  ),
  "float32 .* at 'first/b'": lambda: init_with(
    first={"w": np.ones(2, np.float32), "b": np.ones(2, np.float16)}
  ),
  r"output of stage a.*int32\[2\]": lambda: step_stages(
    lambda p, x, b: jnp.arange(2), lambda p, x, b: x.sum()
  ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_invalid_arguments_are_refused(message):
  with pytest.raises((TypeError, ValueError), match=message):
    ERRORS[message]()


def test_invalid_levels_are_refused_before_anything_is_donated():
  model = model_of(weights=LEVELS)
  state = model.init(params_of())
  for level, message in (
    (3, r"in \[0, 2\], got 3 for 'first'"),
    ([0, -1, 0], "got -1 for 'block0'"),
    ([0, 1], "one for each of the 3 groups"),
  ):
    with pytest.raises(ValueError, match=message):
      model.step(state, batch_of(), level)
  model.step(state, batch_of(), 2)
