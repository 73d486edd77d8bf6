"""Predicts seconds and bytes of steps, exchanges and collectives."""

from jaxmotion.perfmodel.predict._codecs import (
  decode_seconds as decode_seconds,
  encode_seconds as encode_seconds,
)
from jaxmotion.perfmodel.predict._collectives import (
  Traffic as Traffic,
  collective_seconds as collective_seconds,
  hierarchical as hierarchical,
  ledger_seconds as ledger_seconds,
  traffic as traffic,
)
from jaxmotion.perfmodel.predict._coverage import unmeasured as unmeasured
from jaxmotion.perfmodel.predict._exchange import (
  Exchange as Exchange,
  exchange_ledger as exchange_ledger,
  predict_exchange as predict_exchange,
)
from jaxmotion.perfmodel.predict._overlap import (
  Message as Message,
  blocking_seconds as blocking_seconds,
  overlapped_seconds as overlapped_seconds,
)
from jaxmotion.perfmodel.predict._roofline import (
  curve_of as curve_of,
  kernel_seconds as kernel_seconds,
  ready_seconds as ready_seconds,
  seconds as seconds,
)
from jaxmotion.perfmodel.predict._split_step import layered_step as layered_step
from jaxmotion.perfmodel.predict._step import (
  Step as Step,
  Work as Work,
  data_parallel as data_parallel,
  work as work,
)
