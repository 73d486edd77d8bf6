"""Codecs: encode an array to a payload of machine words, and decode it.

Codecs are frozen dataclasses with lower-case names, like functions, so that
`repr(codec)` is the expression that constructs it.
"""

from jaxmotion.codecs._arrays._blocks import (
  microscaling as microscaling,
  nonnegative as nonnegative,
  sign as sign,
  ternary as ternary,
  uniform as uniform,
  vote as vote,
)
from jaxmotion.codecs._arrays._floats import (
  cast as cast,
  identity as identity,
  truncate as truncate,
)
from jaxmotion.codecs._arrays._levels import (
  codebook as codebook,
  lloyd_max as lloyd_max,
)
from jaxmotion.codecs._arrays._linear import (
  dct as dct,
  rotate as rotate,
  tiles as tiles,
)
from jaxmotion.codecs._arrays._sparse import (
  random_k as random_k,
  threshold as threshold,
  zero_value as zero_value,
)
from jaxmotion.codecs._arrays._topk import (
  topk as topk,
  topk_columns as topk_columns,
)
from jaxmotion.codecs._bases import MultiRoundCodec as MultiRoundCodec
from jaxmotion.codecs._codec import Codec as Codec
from jaxmotion.codecs._combinators._chain import chain as chain
from jaxmotion.codecs._combinators._feedback import feedback as feedback
from jaxmotion.codecs._combinators._multi_round import (
  ef21 as ef21,
  low_rank as low_rank,
  onebit as onebit,
)
from jaxmotion.codecs._combinators._selection import (
  contributors as contributors,
  momentum_correction as momentum_correction,
)
from jaxmotion.codecs._combinators._trees import (
  buckets as buckets,
  rules as rules,
  where_smaller as where_smaller,
)
from jaxmotion.codecs._laws import (
  ErrorBound as ErrorBound,
  Laws as Laws,
  MemoryPart as MemoryPart,
)
from jaxmotion.codecs._rounds import Message as Message, Reduced as Reduced
from jaxmotion.core import set_public_module as _set_public_module

_set_public_module(__name__, globals())
