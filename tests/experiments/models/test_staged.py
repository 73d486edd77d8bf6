import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.models import catalog, staged
from experiments.weights import model as weights_model

# arXiv:2004.02297 gives millions for 201 classes; biases and norms included.
PARAMETERS = {
  "alexnet": (63_811_721, 63.8),
  "vgg_a": (129_589_833, 129.6),
  "resnet34": (21_387_785, 21.4),
}
PIXELS = jax.ShapeDtypeStruct((2, 224, 224, 3), "float32")


def build_tiny(network, **changes):
  options = {
    "size": 32,
    "channels": 1,
    "classes": 5,
    "width": 1 / 64,
    "seed": 0,
  }
  return staged.build_stages(network, **options | changes)


@pytest.mark.parametrize("network", PARAMETERS)
def test_full_size_has_the_parameters_of_the_paper(network):
  full = functools.partial(
    build_tiny, network, size=224, channels=3, classes=201, width=1.0
  )
  model = weights_model.abstract_model(full)
  count, millions = PARAMETERS[network]
  assert sum(x.size for x in jax.tree.leaves(model.params)) == count
  assert round(count / 1e6, 1) == millions
  costs = weights_model.stage_costs(model, PIXELS)
  assert sum(cost.weights for cost in costs) == count
  assert all(cost.flops > 0 for cost in costs)


def test_the_cost_of_a_dense_stage_is_that_of_its_matmul():
  model = weights_model.abstract_model(lambda: build_tiny("vgg_a")[-1:])
  (name,) = model.params
  inputs, outputs = model.params[name]["dense"]["kernel"].shape
  (cost,) = weights_model.stage_costs(
    model, jax.ShapeDtypeStruct((3, inputs), "float32")
  )
  assert cost.weights == inputs * outputs + outputs
  least = 2 * 3 * inputs * outputs
  assert least <= cost.flops <= least + 2 * 3 * outputs


# The full size has other first layers, and 64 pixels other dense ones.
@pytest.mark.parametrize(
  ("network", "size"), [("alexnet", 64), ("alexnet", 224), ("vgg_a", 64)]
)
def test_images_of_any_size_become_logits(network, size):
  model = weights_model.abstract_model(
    functools.partial(build_tiny, network, size=size)
  )
  x = jax.ShapeDtypeStruct((2, size, size, 1), "float32")
  for name, stage in model.stages:
    args = model.params[name], model.stats[name], x
    x = jax.eval_shape(stage.evaluate, *args)
  assert x.shape == (2, 5)


def test_stages_of_resnet_are_blocks_that_are_equal_for_two_seeds(monkeypatch):
  def describe(size, classes, width):
    options = {"image": size, "classes": classes, "width": width}
    blocks = {"blocks": (3, 2, 1, 1), "block": "basic"}
    return catalog.make_network("resnet", **blocks, **options)

  monkeypatch.setitem(staged.NETWORKS, "resnet34", describe)
  first, second = (
    weights_model.abstract_model(
      functools.partial(build_tiny, "resnet34", seed=s)
    ).stages
    for s in (0, 1)
  )
  names, functions = zip(*first, strict=True)
  assert (names[0], names[-1]) == ("00_stem", "08_head")
  assert all("block" in name for name in names[1:-1])
  assert first == second
  assert hash(functions[1]) == hash(second[1][1])
  # Blocks 1 and 2 have equal shapes, block 4 changes them.
  assert functions[1] == functions[2] != functions[4]


def test_only_the_seed_decides_the_parameters():
  a, b, c = (
    weights_model.as_model(build_tiny("vgg_a", seed=seed)).params
    for seed in (0, 0, 1)
  )
  jax.tree.map(np.testing.assert_array_equal, a, b)
  assert (
    a["00_conv"]["conv"]["kernel"] != c["00_conv"]["conv"]["kernel"]
  ).all()


@pytest.mark.parametrize("window", [2, 3])
def test_max_pool_has_stride_two_and_no_padding(window):
  x = jax.random.normal(jax.random.key(0), (2, 8, 9, 3))
  y = staged.max_pool(x, window)
  expected = nnx.max_pool(x, (window, window), (2, 2), padding="VALID")
  np.testing.assert_array_equal(y, expected)


def test_training_normalizes_a_batch_and_updates_its_statistics():
  stage = staged.Normed(1, 2, 3, rngs=nnx.Rngs(0))
  model = weights_model.as_model([stage])
  ((name, function),) = model.stages
  x = 5 + jax.random.normal(jax.random.key(0), (16, 4, 4, 1))

  graph = function.graph
  inner = weights_model.Stage(graph, first=True, last=False)
  y, stats = jax.jit(inner)(
    model.params[name], model.stats[name], None, {"pixels": x}
  )
  np.testing.assert_allclose(y.mean(axis=(0, 1, 2)), 0, atol=1e-5)
  before, after = (s["norm"]["mean"] for s in (model.stats[name], stats))
  assert not np.allclose(before, after)
  # Evaluation uses the running statistics: another output, no update.
  scored = inner.evaluate(model.params[name], stats, x)
  assert np.abs(np.asarray(scored.mean(axis=(0, 1, 2)))).max() > 0.1


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"network": "lenet"}, r"`config.model` must be one of .*got 'lenet'"),
    ({"size": 48}, r"`config.image_size` must be a multiple of 32, got 48"),
    ({"width": 0.0}, r"`config.width` must be greater than 0, got 0.0"),
  ],
)
def test_settings_are_checked(changes, message):
  with pytest.raises(ValueError, match=message):
    build_tiny(**{"network": "vgg_a"} | changes)


def test_correct_examples_count_with_their_weights():
  model = weights_model.as_model(build_tiny("vgg_a"))
  pixels = jax.random.normal(jax.random.key(0), (4, 32, 32, 1))
  stats = tuple(model.stats.values())
  given = model.stages, model.params, stats
  batch = {"pixels": pixels, "weight": jnp.ones(4)}

  def count(label, **changes):
    labels = {"labels": jnp.full(4, label)}
    return float(weights_model.count_correct(*given, batch | labels | changes))

  every = [count(label) for label in range(5)]
  assert sum(every) == 4  # Each image has one class.
  assert count(int(np.argmax(every)), weight=jnp.zeros(4)) == 0
