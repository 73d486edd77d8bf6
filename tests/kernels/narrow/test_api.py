import jax
import jax.numpy as jnp
import pytest

from jaxmotion import codecs
from jaxmotion.core import shape_dtype
from jaxmotion.kernels import narrow
from tests.kernels.lowering import kernel_calls

X = jnp.zeros(4096)
WORDS = jnp.zeros((2, 4096), jnp.uint16)
PLANES = (jnp.zeros((2, 4096), jnp.uint8),) * 3
FIRST = tuple(p[0] for p in PLANES)
OPS = {
  "cast_encode": (X, "bfloat16"),
  "cast_decode": (WORDS[0], shape_dtype(X), "bfloat16"),
  "cast_sum": (WORDS, shape_dtype(X), "bfloat16"),
  "truncate_encode": (X, 3),
  "truncate_decode": (FIRST, shape_dtype(X)),
  "truncate_sum": (PLANES, shape_dtype(X)),
}


@pytest.mark.parametrize("op", OPS)
def test_kernels_run_if_named_and_not_otherwise(op):
  x, *others = OPS[op]

  def calls(implementation):
    return kernel_calls(
      lambda x: getattr(narrow, op)(x, *others, implementation=implementation),
      x,
    )

  assert calls("pallas_triton") == 1
  assert calls(None) == 0


@pytest.mark.parametrize(
  "codec", [codecs.cast("float8_e5m2"), codecs.truncate(bytes=2)]
)
def test_codecs_run_what_the_environment_names(codec, monkeypatch):
  payload = codec.encode(X)[0]
  both = jax.tree.map(lambda a: jnp.stack([a, a]), payload)
  monkeypatch.setenv("JAXMOTION_KERNELS", "pallas_triton")
  assert kernel_calls(lambda x: codec.encode(x)[0], X) == 1
  assert kernel_calls(lambda p: codec.decode(p, X), payload) == 1
  assert kernel_calls(lambda p: codec.sum_decoded(p, X), both) == 1
