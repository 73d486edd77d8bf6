"""Codecs: encode an array to a payload of machine words, and decode it.

Codecs are frozen dataclasses with lower-case names, like functions, so that
`repr(codec)` is the expression that constructs it.

`Rounds[T]` is the type of a reduction: a generator that yields a `Message`,
gets the reply, and in the end returns a T. A `MultiRoundCodec` writes one:

  >>> from jaxmotion import codecs
  >>> def add_up(x) -> codecs.Rounds[codecs.Reduced]:
  ...   total = yield codecs.Message("sum", x)
  ...   return codecs.Reduced(total / 2, x, ())
  >>> next(add_up(1.0)).kind
  'sum'
"""

from jaxmotion.codecs._codec import Codec as Codec, MemoryPart as MemoryPart
from jaxmotion.codecs._config import from_config as from_config
from jaxmotion.codecs._laws import ErrorBound as ErrorBound, Laws as Laws
from jaxmotion.codecs._rounds import (
  Message as Message,
  Reduced as Reduced,
  Rounds as Rounds,
)
from jaxmotion.codecs.combinators._buckets import buckets as buckets
from jaxmotion.codecs.combinators._chain import chain as chain
from jaxmotion.codecs.combinators._contributors import (
  contributors as contributors,
)
from jaxmotion.codecs.combinators._ef21 import ef21 as ef21
from jaxmotion.codecs.combinators._feedback import feedback as feedback
from jaxmotion.codecs.combinators._low_rank import low_rank as low_rank
from jaxmotion.codecs.combinators._momentum_correction import (
  momentum_correction as momentum_correction,
)
from jaxmotion.codecs.combinators._multi_round import (
  MultiRoundCodec as MultiRoundCodec,
)
from jaxmotion.codecs.combinators._onebit import onebit as onebit
from jaxmotion.codecs.combinators._rotate import rotate as rotate
from jaxmotion.codecs.combinators._rules import rules as rules
from jaxmotion.codecs.combinators._where_smaller import (
  where_smaller as where_smaller,
)
from jaxmotion.codecs.quantizers._cast import cast as cast
from jaxmotion.codecs.quantizers._codebook import codebook as codebook
from jaxmotion.codecs.quantizers._identity import identity as identity
from jaxmotion.codecs.quantizers._lloyd_max import lloyd_max as lloyd_max
from jaxmotion.codecs.quantizers._microscaling import (
  microscaling as microscaling,
)
from jaxmotion.codecs.quantizers._nonnegative import nonnegative as nonnegative
from jaxmotion.codecs.quantizers._sign import sign as sign
from jaxmotion.codecs.quantizers._ternary import ternary as ternary
from jaxmotion.codecs.quantizers._truncate import truncate as truncate
from jaxmotion.codecs.quantizers._uniform import uniform as uniform
from jaxmotion.codecs.quantizers._vote import vote as vote
from jaxmotion.codecs.quantizers._zero_value import zero_value as zero_value
from jaxmotion.codecs.sparse._dct import dct as dct
from jaxmotion.codecs.sparse._random_k import random_k as random_k
from jaxmotion.codecs.sparse._threshold import threshold as threshold
from jaxmotion.codecs.sparse._tiles import tiles as tiles
from jaxmotion.codecs.sparse._topk import topk as topk
from jaxmotion.codecs.sparse._topk_columns import topk_columns as topk_columns
from jaxmotion.core import set_public_module as _set_public_module

_set_public_module(__name__, globals())
