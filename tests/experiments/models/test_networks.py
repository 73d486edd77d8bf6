import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import models
from experiments.models.layers import Add, Dense, MeanPool

# Parameters and shapes of activations: those of torchvision; of the Caffe
# models of GoogLeNet and NiN; of the TensorFlow model of Inception-v4.
PUBLISHED = {
  "alexnet": (
    61_100_840,
    {"conv1/pool1": (27, 27, 64), "conv5/pool5": (6, 6, 256)},
  ),
  "vgg16": (138_357_544, {"conv5_3/pool5": (7, 7, 512)}),
  "squeezenet": (
    1_248_424,
    {"conv1/pool1": (54, 54, 96), "fire8/pool8": (13, 13, 512)},
  ),
  "resnet50": (
    25_557_032,
    {"stem/pool": (56, 56, 64), "stage4_rest/1/add": (7, 7, 2048)},
  ),
  "googlenet": (6_998_552, {"inception4e/pool4e": (7, 7, 832)}),
  "nin": (7_595_176, {"mix3b/pool3": (6, 6, 384)}),
  "inception_v4": (
    42_679_816,
    {"reduce_a/pool": (17, 17, 384), "c/2/one": (8, 8, 256)},
  ),
}
TINY = {
  "resnet": {"blocks": (3, 1, 1, 1), "image": 32, "width": 1 / 16},
  "gpt": {"layers": 2, "length": 8, "heads": 2, "width": 1 / 64},
}


def tiny(name):
  options = TINY.get(name, {"image": 32, "width": 1 / 4})
  net = models.make_network(name, classes=5, **options)
  if name != "resnet":
    return net
  # One stage has each kind of block; four take four times as long to compile.
  left_out = ("stage2", "stage3", "stage4")
  stages = [s for s in net.stages if not s.name.startswith(left_out)]
  return dataclasses.replace(net, stages=tuple(stages))


def run(fn, *args):
  """Calls a function that is compiled without optimizations."""
  options = {"xla_backend_optimization_level": 0}
  return jax.jit(fn).lower(*args).compile(options)(*args)


@functools.cache
def given(name):
  """Returns parameters and a batch of two."""
  net = tiny(name)
  inputs, labels = net.batch(2)
  random = np.random.default_rng(0)
  if inputs.dtype == "int32":
    x = random.integers(0, 5, inputs.shape, "int32")
  else:
    x = random.standard_normal(inputs.shape, "float32")
  y = random.integers(0, 5, labels.shape, "int32")
  return run(net.init, jax.random.key(0)), (jnp.asarray(x), jnp.asarray(y))


@pytest.mark.parametrize("name", PUBLISHED)
def test_full_size_has_the_published_parameters_and_activations(name):
  size, shapes = PUBLISHED[name]
  net = models.make_network(name)
  assert net.size == size
  images, _ = net.batch(1)
  seen = jax.eval_shape(net.activations, net.params, images)
  assert {k: seen[k].shape[1:] for k in shapes} == shapes


def test_the_decoder_with_its_vocabulary_is_gpt2_medium():
  net = models.make_network("gpt", classes=50257)
  kernel_of_logits = 50257 * 1024  # GPT-2's is that of its embedding.
  assert net.size - kernel_of_logits == 354_823_168
  inputs, labels = net.batch(8)
  assert inputs.shape == labels.shape == (8, 1024)


@pytest.mark.parametrize("layers", models.DEPTHS)
def test_a_resnet_has_the_depth_it_is_called_after(layers):
  blocks, block = models.DEPTHS[layers], models.block_kind(layers)
  assert models.count_layers(blocks, block) == layers
  net = models.make_network(f"resnet{layers}", width=1 / 64)
  # Layers with kernels are counted, but not the shortcuts.
  kernels = sum(
    leaf.shape[0] if leaf.ndim == 5 else 1
    for path, leaf in jax.tree.leaves_with_path(net.params)
    if "kernel" in str(path) and "shortcut" not in str(path)
  )
  assert kernels == layers
  assert net == models.make_network(
    "resnet", blocks=list(blocks), block=block, width=1 / 64
  )


# Networks whose blocks repeat; experiments.activations trains the others.
@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_gradients_reach_every_parameter_and_no_wrapper_changes_them(name):
  net = tiny(name)
  wrapped = []

  def wrap(block, stage):
    wrapped.append(stage)
    return jax.checkpoint(block)

  @jax.value_and_grad
  def plain(params, batch):
    return net.loss(params, batch)

  @jax.grad
  def saved(params, batch):
    return net.loss(params, batch, wrap)

  (loss, grads), same = run(lambda *a: (plain(*a), saved(*a)), *given(name))
  assert 0 < loss < 20
  assert wrapped == [stage.name for stage in net.stages]
  for (path, a), b in zip(
    jax.tree.leaves_with_path(grads), jax.tree.leaves(same), strict=True
  ):
    assert np.isfinite(a).all() and np.any(a), path
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_repeated_blocks_are_one_scan_of_stacked_parameters():
  net = tiny("resnet")
  params, (images, _) = given("resnet")
  rest = params["stage1_rest"]
  assert {leaf.shape[0] for leaf in jax.tree.leaves(rest)} == {2}
  jaxpr = str(jax.make_jaxpr(net.apply)(params, images))
  assert jaxpr.count("scan[") == sum(s.repeats > 1 for s in net.stages) == 1
  block = net.stages[2].block
  x = jax.random.normal(jax.random.key(0), (2, 4, 4, 4 * 4))
  first, second = (jax.tree.map(lambda a, i=i: a[i], rest) for i in (0, 1))
  one = models.Network("one", net.stages[2:3], net.input, net.label)
  np.testing.assert_allclose(
    run(one.apply, params, x),
    run(lambda a, b, x: block(b, block(a, x)), first, second, x),
    rtol=1e-3,
    atol=1e-5,
  )


def test_every_relu_and_pool_is_seen():
  net = tiny("squeezenet")
  images, _ = net.batch(1)
  seen = jax.eval_shape(net.activations, net.params, images)
  jaxpr = str(jax.make_jaxpr(net.activations)(net.params, images))
  pools = jaxpr.count("reduce_window_max")
  relus = jaxpr.count("custom_jvp_call[")
  assert len(seen) == pools + relus


def test_mean_pooling_counts_pixels_inside_the_image():
  x = jnp.arange(16.0).reshape(1, 4, 4, 1)
  y = MeanPool("mean")({}, x)[0, :, :, 0]
  assert y[0, 0] == (0 + 1 + 4 + 5) / 4
  assert y[1, 1] == np.mean([0, 1, 2, 4, 5, 6, 8, 9, 10])


def test_activations_are_those_of_a_normalized_batch():
  net = tiny("resnet")
  params, (images, _) = given("resnet")
  shift = {"bias": jnp.full(4, 9.0)}  # So far up that the ReLU does nothing.
  only = models.Network("stem", net.stages[:1], net.input, net.label)
  seen = run(only.activations, {"stem": params["stem"] | shift}, images)
  assert list(seen) == ["stem/conv"]
  y = seen["stem/conv"] - 9
  np.testing.assert_allclose(y.mean((0, 1, 2)), 0, atol=1e-5)
  np.testing.assert_allclose(y.std((0, 1, 2)), 1, atol=1e-3)


def test_attention_is_causal():
  net = tiny("gpt")
  params, (tokens, _) = given("gpt")
  other = tokens.at[:, 5].add(1) % 5
  both = np.concatenate([tokens, other])
  same = np.equal(*np.split(run(net.apply, params, both), 2))
  assert same[:, :5].all() and not same[:, 5].all()


@pytest.mark.parametrize(
  ("name", "options", "message"),
  [
    ("lenet", {}, "`name` must be one of 'alexnet'"),
    ("resnet", {"blocks": (3, 4)}, r"`blocks` must be four numbers, got \(3"),
    ("resnet", {"blocks": (3, 4, 6, 0)}, r"`blocks\[3\]` must be an integer"),
    ("nin", {"image": 16}, "`image` must be an integer >= 32, got 16"),
    ("resnet", {"blocks": [1] * 4, "block": "wide"}, "`block` must be one"),
    ("googlenet", {"variant": "v2"}, "`variant` must be one of 'paper'"),
    ("vgg16", {"width": 0.0}, "`width` must be a positive number, got 0.0"),
    ("gpt", {"heads": 3}, "`heads` must divide 1024 channels, got 3"),
  ],
)
def test_options_are_checked(name, options, message):
  with pytest.raises(ValueError, match=message):
    models.make_network(name, **options)


def residual_mlp(repeats):
  """Returns a network with a repeated block for each number of repeats."""
  stages = [
    models.Stage(f"stage{i}", Add("add", Dense("dense", 8)), count)
    for i, count in enumerate(repeats)
  ]
  inputs = jax.ShapeDtypeStruct((8,), "float32")
  label = jax.ShapeDtypeStruct((), "int32")
  return models.Network("mlp", tuple(stages), inputs, label)


# Four repeats and three: in pairs and one by one, or all at once.
@pytest.mark.parametrize(("together", "scans"), [(2, 2), (4, 0)])
def test_repeats_that_are_wrapped_together_are_the_same_network(
  together, scans
):
  net = residual_mlp((4, 3))
  params = run(net.init, jax.random.key(0))
  rng = np.random.default_rng(0)
  batch = (rng.standard_normal((2, 8), "float32"), np.array([1, 5]))
  wrapped = []

  def wrap(block, name):
    wrapped.append(name)
    return jax.checkpoint(block)

  loss = lambda p, b: net.loss(p, b, wrap, together)
  found, expected = run(
    lambda *a: tuple(jax.value_and_grad(f)(*a) for f in (loss, net.loss)),
    *(params, batch),
  )
  assert wrapped == ["stage0", "stage1"]
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-3),
    found,
    expected,
  )
  assert str(jax.make_jaxpr(loss)(params, batch)).count("scan[") == scans
