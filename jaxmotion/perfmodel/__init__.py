"""Predicts the time, bytes and memory of a training step before it runs.

A `Platform` describes devices and links. `predict_cost` counts the FLOPs, bytes
and memory of any JAX function, and `predict_exchange` predicts the exchange of
its gradients with any codec. `predict_step` combines both into a step.
Predictions need shapes alone: nothing is measured or run.
"""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.perfmodel._collectives import (
  CollectiveTraffic as CollectiveTraffic,
  collective_seconds as collective_seconds,
  collective_traffic as collective_traffic,
  ledger_seconds as ledger_seconds,
  uncalibrated as uncalibrated,
)
from jaxmotion.perfmodel._cost import (
  Cost as Cost,
  Total as Total,
  predict_cost as predict_cost,
)
from jaxmotion.perfmodel._datasheets import builtin_platform as builtin_platform
from jaxmotion.perfmodel._exchange import (
  ExchangePrediction as ExchangePrediction,
  exchange_ledger as exchange_ledger,
  predict_exchange as predict_exchange,
)
from jaxmotion.perfmodel._figures import (
  Curve as Curve,
  Rate as Rate,
  gbit_per_s as gbit_per_s,
  gbyte_per_s as gbyte_per_s,
)
from jaxmotion.perfmodel._fusion import Kernel as Kernel
from jaxmotion.perfmodel._json import (
  load_platform as load_platform,
  platform_from_dict as platform_from_dict,
  platform_to_dict as platform_to_dict,
  save_platform as save_platform,
)
from jaxmotion.perfmodel._platform import (
  Axis as Axis,
  Device as Device,
  Link as Link,
  Platform as Platform,
)
from jaxmotion.perfmodel._roofline import predict_seconds as predict_seconds
from jaxmotion.perfmodel._step import (
  StepCost as StepCost,
  StepPrediction as StepPrediction,
  predict_step as predict_step,
  trace_step as trace_step,
)

_set_public_module(__name__, globals())
