"""The page of the codecs shows the laws that they state."""

import pytest

from jaxmotion import codecs
from jaxmotion.codecs import ErrorBound, Laws
from tests.paths import ROOT

SHOWN = (
  codecs.identity(),
  codecs.cast("bfloat16"),
  codecs.cast("float8_e4m3fn"),
  codecs.truncate(bytes=3),
  codecs.uniform(bits=8),
  codecs.uniform(bits=8, rounding="stochastic"),
  codecs.uniform(bits=8, symmetric=False),
  codecs.uniform(bits=1),
  codecs.sign(),
  codecs.ternary(),
  codecs.ternary(rounding="threshold"),
  codecs.microscaling(format="float8_e4m3fn"),
  codecs.nonnegative(),
  codecs.topk(density=0.01),
  codecs.random_k(density=0.01),
  codecs.random_k(density=0.01, scaled=False),
  codecs.threshold(value=0.001, capacity=0.1),
  codecs.zero_value(capacity=0.5),
  codecs.topk_columns(density=0.01),
  codecs.codebook(bits=2),
  codecs.tiles(chunk=64),
  codecs.dct(chunk=64),
  codecs.lloyd_max(bits=2),
  codecs.microscaling(format="float4_e3m0"),
  codecs.low_rank(rank=1),
  codecs.rotate(),
)


def write_expression(codec):
  """The shortest expression that makes the codec."""
  fields = []
  for name, value in codec.config().items():
    plain = {k: v for k, v in codec.config().items() if k not in (name, "name")}
    kind = codec.config()["name"]
    try:
      same = codecs.Codec.from_config({"name": kind, **plain}) == codec
    except (TypeError, ValueError):
      same = False
    if name != "name" and not same:
      fields.append(f"{name}={value!r}")
  return f"{type(codec).__name__}({', '.join(fields)})"


def write_row(codec):
  """The line of the codec in the table of the page."""
  laws = codec.laws
  error = laws.error or codecs.ErrorBound()
  parts = [] if laws.error else ["no bound"]
  if error.relative:
    parts.append(f"{error.relative:.2g} \\|x\\|")
  if error.peak:
    parts.append(f"{error.peak:.2g} max")
  if error.floor > 1e-30:
    parts.append(f"{error.floor:.2g}")
  cells = [
    f"`{write_expression(codec)}`",
    " + ".join(parts) or "0",
    "yes" if laws.unbiased else "",
    "yes" if laws.keeps_zeros else "",
    "yes" if laws.bounds_memory else "",
    laws.nonfinite,
  ]
  return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("codec", SHOWN, ids=repr)
def test_the_page_shows_the_laws(codec):
  assert write_row(codec) in (ROOT / "docs" / "codecs.md").read_text()


def test_a_chain_keeps_what_all_of_its_codecs_keep():
  topk, int8 = codecs.topk(density=0.1), codecs.uniform(bits=8)
  laws = codecs.chain(topk, int8).laws
  assert laws.keeps_zeros and laws.bounds_memory and not laws.unbiased
  assert 0 < laws.contraction < topk.laws.contraction
  assert laws.error.peak == int8.laws.error.peak
  assert not codecs.chain(topk, codecs.sign()).laws.keeps_zeros
  assert not codecs.chain(topk, codecs.ternary()).laws.bounds_memory


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: Laws(nonfinite="never"), "`nonfinite` must be one of"),
    (lambda: Laws(contraction=1.5), r"`contraction` must be a number in"),
    (lambda: Laws(error=0.1), "`error` must be an ErrorBound or None"),
    (lambda: Laws(lossless=1), "`lossless` must be True or False"),
    (lambda: ErrorBound(peak=-1.0), "`peak` must be a number"),
  ],
)
def test_bad_laws_are_named(make, message):
  with pytest.raises((TypeError, ValueError), match=message):
    make()
