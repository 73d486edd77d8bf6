import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.models import small
from experiments.models.initial import draw_kernel, draw_table


def parameters(model):
  return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def test_sizes_that_do_not_divide_are_refused():
  with pytest.raises(ValueError, match=r"`width` must be divisible .*got 9"):
    small.Transformer(layers=1, width=9, heads=2, context=4, rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match=r"`shape` must be divisible by 4"):
    small.Cnn(
      (6, 8, 1), channels=(2, 2, 2), hidden=4, classes=2, rngs=nnx.Rngs(0)
    )


def test_pooling_takes_means_of_squares():
  x = jnp.arange(16.0).reshape(1, 4, 4, 1)
  np.testing.assert_array_equal(
    small._halve(x)[0, :, :, 0], [[2.5, 4.5], [10.5, 12.5]]
  )


def test_transformer_looks_at_the_past_only(tiny):
  graph, params = nnx.split(small.build_transformer(tiny("bytes_lm"), seed=0))
  run = jax.jit(lambda params, text: nnx.merge(graph, params)(text))
  text = np.arange(8)[None]
  changed = text.copy()
  changed[0, 5] = 200
  same = np.asarray(run(params, text)) == np.asarray(run(params, changed))
  assert same[0, :5].all()
  assert not same[0, 5:].all(axis=-1).any()


@pytest.mark.parametrize("name", ["digits", "bytes_lm"])
def test_seed_alone_decides_the_parameters(tiny, name):
  config = tiny(name)

  def build(seed):
    if name == "digits":
      return parameters(small.build_cnn(config, (8, 8, 1), 10, seed))
    return parameters(small.build_transformer(config, seed))

  first, again, other = (jax.tree.leaves(build(seed)) for seed in (1, 1, 2))
  for a, same, b in zip(first, again, other, strict=True):
    np.testing.assert_array_equal(a, same)
    assert a.ndim == 1 or (a != b).any()


def test_full_digits_model_is_nearly_all_kernels(load_config):
  def build(pixels):
    model = small.build_cnn(load_config("digits"), (8, 8, 1), 10, seed=0)
    return model(pixels), parameters(model)

  pixels = jax.ShapeDtypeStruct((3, 8, 8, 1), jnp.float32)
  logits, params = jax.eval_shape(build, pixels)
  assert logits.shape == (3, 10)
  leaves = jax.tree.leaves(params)
  large = sum(leaf.size for leaf in leaves if leaf.ndim > 1)
  total = sum(leaf.size for leaf in leaves)
  assert total == 151_306  # as the docstring of the configuration says
  assert large / total > 0.998


INITIALIZERS = {
  "lecun": (draw_kernel(), nnx.initializers.lecun_normal()),
  "he": (draw_kernel(2.0), nnx.initializers.he_normal()),
  "table": (draw_table(0.02), nnx.initializers.normal(0.02)),
}


# One shape is drawn with others, one has a program of its own.
@pytest.mark.parametrize(
  ("shape", "name"), [((3, 5), "lecun"), ((70, 60), "he"), ((3, 5), "table")]
)
def test_values_are_those_of_flax(name, shape):
  ours, theirs = INITIALIZERS[name]
  key = jax.random.key(3)
  drawn = ours(key, shape, jnp.float32)
  expected = theirs(key, shape, jnp.float32)
  assert (drawn.shape, drawn.dtype) == (expected.shape, expected.dtype)
  # One compiler may multiply by the deviation another way.
  np.testing.assert_allclose(drawn, expected, rtol=3e-7)
