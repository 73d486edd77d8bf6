"""The page of the codecs shows the laws that they state."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs, make_key
from jaxmotion.codecs import ErrorBound, Laws
from jaxmotion.codecs._bases import ArrayCodec
from jaxmotion.codecs._laws import NONFINITE
from tests.codecs.jitted import encode, normal, trip
from tests.codecs.table import CODECS
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "codecs.md").read_text()
# The rows from the call of a codec to its law of what is not finite.
LAST = f"(?:{'|'.join(NONFINITE)})"
ROWS = re.findall(rf"^\| `(\w+\(.*\))` \| (.* \| {LAST}) \|$", PAGE, re.M)


def write_cells(laws):
  """Returns the cells of a codec's row, without its name."""
  error = laws.error or ErrorBound()
  parts = [] if laws.error else ["no bound"]
  if error.relative:
    parts.append(f"{error.relative:.2g} \\|x\\|")
  if error.peak:
    parts.append(f"{error.peak:.2g} max")
  if error.floor > 1e-30:
    parts.append(f"{error.floor:.2g}")
  says = laws.unbiased, laws.keeps_zeros, laws.bounds_memory
  cells = [" + ".join(parts) or "0", *("yes" if law else "" for law in says)]
  return " | ".join([*cells, laws.nonfinite])


def test_the_page_shows_the_laws():
  for expression, cells in ROWS:
    assert write_cells(eval(expression, vars(codecs)).laws) == cells
  names = {expression.partition("(")[0] for expression, _ in ROWS}
  assert names >= {
    name
    for name, kind in vars(codecs).items()
    if isinstance(kind, type)
    and issubclass(kind, ArrayCodec)
    and name != "vote"
  }


def test_a_chain_keeps_what_all_of_its_codecs_keep():
  topk, int8 = codecs.topk(density=0.1), codecs.uniform(bits=8)
  laws = codecs.chain(topk, int8).laws
  assert laws.keeps_zeros and laws.bounds_memory and not laws.unbiased
  assert 0 < laws.contraction < topk.laws.contraction
  assert laws.error.peak == int8.laws.error.peak
  assert not codecs.chain(topk, codecs.sign()).laws.keeps_zeros
  assert not codecs.chain(topk, codecs.ternary()).laws.bounds_memory


@pytest.mark.parametrize(
  "codec",
  [
    codecs.uniform(bits=4, block=32),
    codecs.uniform(bits=4, block=32, symmetric=False),
    codecs.sign(block=32),
    codecs.ternary(block=32),
    codecs.ternary(block=32, rounding="threshold"),
    codecs.nonnegative(block=32),
    *(
      codecs.microscaling(format=name)
      for name in ("float8_e4m3fn", "float6_e2m3fn", "float4_e2m1fn")
    ),
  ],
  ids=repr,
)
def test_a_non_finite_element_spoils_its_block_and_no_other(codec):
  for bad in (np.nan, np.inf, -np.inf):
    # One row a block: 160 rows fill 4, 8, 16, 20 or 32 planes.
    x = np.abs(normal(160, 32))
    x[5, 7] = bad
    _, y = trip(codec, x, make_key(0))
    spoilt = ~np.isfinite(y)
    assert spoilt[5].all() and spoilt.sum() == 32
    assert isinstance(codec, codecs.sign) or np.isnan(y[5]).all()


@pytest.mark.parametrize(
  "name", "bf16 e4m3 truncate2 int4 int5_minmax mxfp6_e3m2".split()
)
def test_narrow_inputs_are_encoded_as_their_float32_values(name):
  for dtype in ("bfloat16", "float16"):
    x = jnp.asarray(10 * normal(77), dtype)
    both = x, x.astype("float32")
    found, wanted = (encode(CODECS[name], a)[0] for a in both)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_what_is_no_contraction_is_refused():
  with pytest.raises(ValueError, match=r"`contraction` must be .* got 1.5"):
    Laws(contraction=1.5)
