"""Predicts seconds, bytes and memory of steps, exchanges and collectives."""

from jaxmotion.perfmodel.predict._codecs import (
  decode_seconds as decode_seconds,
  encode_seconds as encode_seconds,
)
from jaxmotion.perfmodel.predict._collectives import (
  CollectiveTraffic as CollectiveTraffic,
  collective_seconds as collective_seconds,
  collective_traffic as collective_traffic,
  hierarchical_all_reduce_ledger as hierarchical_all_reduce_ledger,
  ledger_seconds as ledger_seconds,
  move_seconds as move_seconds,
)
from jaxmotion.perfmodel.predict._coverage import uncalibrated as uncalibrated
from jaxmotion.perfmodel.predict._exchange import (
  ExchangePrediction as ExchangePrediction,
  exchange_ledger as exchange_ledger,
  predict_exchange as predict_exchange,
)
from jaxmotion.perfmodel.predict._operation import (
  operation_seconds as operation_seconds,
)
from jaxmotion.perfmodel.predict._overlap import (
  Message as Message,
  blocking_seconds as blocking_seconds,
  overlapped_seconds as overlapped_seconds,
)
from jaxmotion.perfmodel.predict._roofline import (
  kernel_curve as kernel_curve,
  kernel_seconds as kernel_seconds,
  predict_ready_seconds as predict_ready_seconds,
  predict_seconds as predict_seconds,
)
from jaxmotion.perfmodel.predict._split_step import (
  predict_split_step as predict_split_step,
)
from jaxmotion.perfmodel.predict._step import (
  StepCost as StepCost,
  StepPrediction as StepPrediction,
  predict_step as predict_step,
  trace_step as trace_step,
)
