import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from jaxmotion import codecs, controllers, memory, wire
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
  model_of,
  params_of,
  record_ops,
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


def abstract_target(state):
  return jax.tree.map(ocp.utils.to_shape_dtype_struct, state)


def train(model, steps=4, level=0, params=None):
  state = model.init(params_of() if params is None else params)
  for i in range(steps):
    state, loss = model.step(state, batch_of(i), level)
  return state, loss


def plain_training(tx, steps=4):
  params = jax.tree.map(jnp.asarray, params_of())
  opt_state = tx.init(params)
  value_and_grad = jax.jit(jax.value_and_grad(whole_loss))

  @jax.jit
  def update(params, opt_state, grads):
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  for i in range(steps):
    loss, grads = value_and_grad(params, batch_of(i))
    params, opt_state = update(params, opt_state, grads)
  return params, opt_state, loss


def test_without_compression_it_is_plain_training_bit_for_bit():
  params, opt_state, loss = plain_training(CLIPPED)
  state, found = train(model_of(tx=CLIPPED, **PLAIN))
  assert tree_bits(state.params) == tree_bits(params)
  assert tree_bits(state.opt_state) == tree_bits(opt_state)
  assert tree_bits(found) == tree_bits(loss)
  assert int(state.step) == 4


def test_a_single_function_is_one_stage():
  model = memory.HostResident(whole_loss, CLIPPED, **PLAIN)
  state, loss = train(model)
  params, _, expected = plain_training(CLIPPED)
  assert tree_bits(state.params) == tree_bits(params) and tree_bits(
    loss
  ) == tree_bits(expected)


def assert_close(a, b, tolerance):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance), a, b
  )


def test_updating_each_stage_alone_changes_nothing():
  whole, _ = train(model_of(**PLAIN))
  alone, _ = train(model_of(update="per_stage", **PLAIN))
  # Other programs may round otherwise.
  assert_close(alone.params, whole.params, 1e-6)
  assert len(alone.opt_state) == len(stages_of())


def test_streaming_sends_twice_and_changes_nothing():
  kept, loss = train(model_of(**PLAIN))
  streamed, streamed_loss = train(model_of(stream_weights=True, **PLAIN))
  assert_close(streamed_loss, loss, 1e-6)
  assert_close(streamed.params, kept.params, 1e-5)
  assert streamed.sent_bytes == 2 * kept.sent_bytes
  assert streamed.returned_bytes == kept.returned_bytes


def test_state_is_on_the_host_and_references_on_the_device():
  grads = codecs.feedback(codecs.uniform(bits=4))
  state, loss = train(model_of(send_difference=True, grads=grads), steps=1)

  def devices(tree):
    return {d for a in jax.tree.leaves(tree) for d in a.devices()}

  for tree in (state.params, state.opt_state, state.reference):
    assert devices(tree) == {HOST}
  for tree in (state.device_reference, state.grad_state, loss):
    assert devices(tree) == {DEVICE}


def test_init_copies_the_parameters():
  params = params_of()
  before = copy_tree(params)
  train(model_of(), params=params)
  assert tree_bits(params) == tree_bits(before)


@pytest.mark.parametrize("send_difference", [False, True])
def test_counted_bytes_are_those_of_the_buffers_that_moved(send_difference):
  model, params = (
    model_of(weights=LEVELS, send_difference=send_difference),
    params_of(),
  )
  state = model.init(params)
  seen, run_op = record_ops()
  state, _ = model.step(state, batch_of(), [0, 1, 2], run_op=run_op)

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
  assert state.sent_bytes == biases + sum(
    wire.payload_bytes(codec, matrix) for codec in LEVELS
  )
  assert state.returned_bytes == biases + 3 * wire.payload_bytes(
    codecs.uniform(bits=8), matrix
  )
  assert model.plain_bytes(params) == biases + 3 * 4 * WIDTH**2
  state, _ = model.step(state, batch_of(), [0, 1, 2])
  assert state.sent_bytes == 2 * moved("send")


def test_the_device_computes_with_decoded_weights():
  """Here the leading byte of each element, biases as they are (A2DTWP)."""
  model = model_of(weights=codecs.truncate(bytes=1))
  seen, run_op = record_ops()
  model.step(model.init(params_of()), batch_of(), run_op=run_op)
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


def test_a_controller_sets_the_levels():
  model = model_of(weights=LEVELS, tx=optax.sgd(0.0))
  state = model.init(params_of())
  # Constant norms count as falling under a positive threshold.
  awp = controllers.awp(threshold=0.1, interval=2, levels=len(LEVELS))
  control, update = awp.init(model.norms(state)), jax.jit(awp.update)
  sent = []
  for _ in range(5):
    before = state.sent_bytes
    state, _ = model.step(state, batch_of(), awp.level(control))
    sent.append(int(state.sent_bytes - before))
    control = update(model.norms(state), control)
  biases = 2 * 4 * WIDTH
  one, two = biases + 3 * WIDTH**2, biases + 3 * 2 * WIDTH**2
  assert sent[:2] == [one] * 2 and sent[4] == two
  assert one < sent[2] == sent[3] < two


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


def test_a_restored_state_continues_bit_for_bit():
  model = model_of(
    weights=codecs.uniform(bits=4, rounding="stochastic"),
    grads=codecs.feedback(codecs.uniform(bits=4)),
    send_difference=True,
  )
  state, _ = train(model, steps=3)
  saved = copy_tree(state)
  expected, _ = model.step(state, batch_of(3))
  restored = model.place_state(saved)
  assert tree_bits(restored) == tree_bits(saved)
  found, _ = model.step(restored, batch_of(3))
  assert tree_bits(found) == tree_bits(expected)


@pytest.mark.parametrize("target", [copy_tree, abstract_target])
def test_a_state_saved_by_orbax_continues_bit_for_bit(target, tmp_path):
  model = model_of(
    grads=codecs.feedback(codecs.uniform(bits=4)),
    send_difference=True,
    update="per_stage",
  )
  state, _ = train(model, steps=2)
  with ocp.StandardCheckpointer() as saver:
    saver.save(tmp_path / "state", state)
    saver.wait_until_finished()
    restored = saver.restore(tmp_path / "state", target(state))
  assert tree_bits(restored) == tree_bits(state)
  assert jax.tree.structure(restored) == jax.tree.structure(state)
  expected, _ = model.step(state, batch_of(3))
  found, _ = model.step(model.place_state(restored), batch_of(3))
  assert tree_bits(found) == tree_bits(expected)
  assert found.sent_bytes.dtype == np.int64 and int(found.step) == 3


def test_rounding_depends_on_seed_step_and_stage():
  codec = codecs.uniform(bits=4, rounding="stochastic")
  same = np.random.default_rng(0).normal(size=(WIDTH, WIDTH))
  params = params_of()
  params["first"]["w"] = params["last"]["w"] = same.astype(np.float32)

  def first_payloads(seed):
    model = model_of(weights=codec, tx=optax.sgd(0.0), seed=seed)
    seen, run_op = record_ops()
    state = model.init(params)
    for _ in range(2):
      state, _ = model.step(state, batch_of(), run_op=run_op)
    outs = [out for name, _, out in seen if name == "pack"]
    large = [o for o in outs if type(o[0]).__name__ == "Symmetric"]
    first, _, last, second_step, _, _ = [
      "".join(map(str, tree_bits(o))) for o in large
    ]
    return first, last, second_step

  first, last, second_step = first_payloads(0)
  assert len({first, last, second_step, first_payloads(1)[0]}) == 4
  assert first_payloads(0) == (first, last, second_step)


@pytest.mark.parametrize(
  ("change", "error", "message"),
  [
    ({"update": "stage"}, ValueError, "`update` must be one of 'once'"),
    (
      {"send_difference": 1},
      TypeError,
      "`send_difference` must be True or False",
    ),
    (
      {"min_leaf_size": -1},
      ValueError,
      "`min_leaf_size` must be an integer >= 0",
    ),
    (
      {"send_difference": True, "stream_weights": True},
      ValueError,
      "`stream_weights` must be",
    ),
    ({"grads": "int8"}, TypeError, "`grads` must be a codec of arrays"),
    ({"weights": ()}, ValueError, "`weights` must hold at least one"),
    ({"weights": LEVELS[::-1]}, ValueError, "from fewest to most bytes"),
    (
      {"weights": codecs.feedback(codecs.uniform(bits=8))},
      ValueError,
      "codecs without state",
    ),
    (
      {"grads": codecs.rules([(".*", codecs.identity())])},
      TypeError,
      "`grads` must be a codec of arrays",
    ),
    ({"tx": 0.1}, TypeError, "`tx` must be an optax"),
  ],
)
def test_invalid_options_are_refused(change, error, message):
  with pytest.raises(error, match=message):
    model_of(**change)


@pytest.mark.parametrize(
  ("stages", "error", "message"),
  [
    ([], ValueError, "at least one stage"),
    ([("a", 1)], TypeError, "pairs of a name and a function"),
    ([("a", whole_loss)] * 2, ValueError, "different names"),
  ],
)
def test_invalid_stages_are_refused(stages, error, message):
  with pytest.raises(error, match=message):
    memory.HostResident(stages, SGD)


def test_invalid_parameters_are_refused():
  model, params = model_of(), params_of()
  with pytest.raises(ValueError, match=r"stages \['block0', 'first', 'last'\]"):
    model.init({**params, "other": {}})
  with pytest.raises(ValueError, match="`params` must be a mapping"):
    model.init([1.0])
  for dtype in (np.int32, np.float16):
    wrong = {**params, "last": {"w": params["last"]["w"].astype(dtype)}}
    with pytest.raises(TypeError, match=r"float32 .* at 'last/w'"):
      model.init(wrong)
  with pytest.raises(ValueError, match="`stats` must be None unless"):
    model.init(params, {"first": 1})
  with pytest.raises(ValueError, match="stages among"):
    model_of(stateful=True).init(params, {"other": 1})


@pytest.mark.parametrize(
  ("groups", "message"),
  [
    ([("attention", "a"), ("", None)], "match a leaf each, got 'attention'"),
    ([("first", "a")], "must cover every leaf, got 'block0/b'"),
    ([("b$", "biases"), ("", "rest")], "got 'biases', which has none"),
  ],
)
def test_invalid_groups_are_refused(groups, message):
  with pytest.raises(ValueError, match=message):
    model_of(groups=groups).init(params_of())


@pytest.mark.parametrize(
  ("level", "error", "message"),
  [
    (3, ValueError, r"in \[0, 2\], got 3 for 'first'"),
    ([0, -1, 0], ValueError, "got -1 for 'block0'"),
    ([0, 1], ValueError, "one for each of the 3 groups"),
    (1.0, TypeError, "`level` must be integers"),
  ],
)
def test_invalid_levels_are_refused_before_anything_is_donated(
  level, error, message
):
  model = model_of(weights=LEVELS)
  state = model.init(params_of())
  with pytest.raises(error, match=message):
    model.step(state, batch_of(), level)
  model.step(state, batch_of(), 2)


def test_invalid_outputs_are_refused():
  params = {"a": {"w": np.ones((2, 2), np.float32)}, "b": {}}

  def step(a, b):
    stages = [("a", a), ("b", b)]
    model = memory.HostResident(stages, SGD, min_leaf_size=0)
    model.step(model.init(params), np.ones(2, np.float32))

  with pytest.raises(TypeError, match=r"output of stage a.*int32\[2\]"):
    step(lambda p, x, b: jnp.arange(2), lambda p, x, b: x.sum())
  with pytest.raises(ValueError, match=r"scalar loss, got float32\[2\]"):
    step(lambda p, x, b: p["w"] @ b, lambda p, x, b: x)
