"""Predicts the time, bytes and memory of a training step before it runs.

A `Platform` describes devices and links. `predict_cost` counts the FLOPs, bytes
and memory of any JAX function, and `predict_exchange` predicts the exchange of
its gradients with any codec. `predict_step` and `predict_split_step` combine
both into a step. Predictions need shapes alone: nothing is measured or run.

`IMAGES` and `LABELS` stand for the batch where a `Layer` of a network names
what it reads:

  >>> from jaxmotion import perfmodel
  >>> def mean_error(params, x, labels):
  ...   return ((x - labels) ** 2).mean()
  >>> inputs = (perfmodel.IMAGES, perfmodel.LABELS)
  >>> perfmodel.Layer("loss", mean_error, {}, inputs, mixes=True).inputs
  (-1, -2)
"""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.perfmodel.cost import (
  Cost as Cost,
  Kernel as Kernel,
  ParamUses as ParamUses,
  Total as Total,
  predict_cost as predict_cost,
)
from jaxmotion.perfmodel.networks import (
  IMAGES as IMAGES,
  LABELS as LABELS,
  Layer as Layer,
  Network as Network,
)
from jaxmotion.perfmodel.platform import (
  Axis as Axis,
  Curve as Curve,
  Device as Device,
  Link as Link,
  Platform as Platform,
  Rate as Rate,
  builtin_platform as builtin_platform,
  gbit_per_s as gbit_per_s,
  gbyte_per_s as gbyte_per_s,
  load_platform as load_platform,
  platform_from_dict as platform_from_dict,
  platform_to_dict as platform_to_dict,
  save_platform as save_platform,
)
from jaxmotion.perfmodel.predict import (
  CollectiveTraffic as CollectiveTraffic,
  ExchangePrediction as ExchangePrediction,
  Message as Message,
  StepCost as StepCost,
  StepPrediction as StepPrediction,
  blocking_seconds as blocking_seconds,
  collective_seconds as collective_seconds,
  collective_traffic as collective_traffic,
  exchange_ledger as exchange_ledger,
  hierarchical_all_reduce_ledger as hierarchical_all_reduce_ledger,
  ledger_seconds as ledger_seconds,
  overlapped_seconds as overlapped_seconds,
  predict_exchange as predict_exchange,
  predict_ready_seconds as predict_ready_seconds,
  predict_seconds as predict_seconds,
  predict_split_step as predict_split_step,
  predict_step as predict_step,
  trace_step as trace_step,
  uncalibrated as uncalibrated,
)

_set_public_module(__name__, globals())
