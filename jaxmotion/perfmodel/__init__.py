"""What a training step will cost, before anything runs.

A `Platform` says what the devices and links can do, `cost` what any JAX
function takes, `predict_exchange` what moving its gradients takes with any
codec, and `data_parallel` and `layered_step` put them together. Everything is
predicted, from shapes: nothing is measured or run.
"""

from jaxmotion.perfmodel.cost import (
  Cost as Cost,
  Kernel as Kernel,
  Total as Total,
  cost as cost,
)
from jaxmotion.perfmodel.networks import (
  IMAGES as IMAGES,
  LABELS as LABELS,
  Layer as Layer,
  Network as Network,
  zoo as zoo,
)
from jaxmotion.perfmodel.platform import (
  Axis as Axis,
  Curve as Curve,
  Device as Device,
  Link as Link,
  Platform as Platform,
  Rate as Rate,
  gbit_per_s as gbit_per_s,
  gbyte_per_s as gbyte_per_s,
  load_platform as load_platform,
  platform_from_dict as platform_from_dict,
  platform_to_dict as platform_to_dict,
  save_platform as save_platform,
  shipped as shipped,
)
from jaxmotion.perfmodel.predict import (
  Exchange as Exchange,
  Message as Message,
  Step as Step,
  Traffic as Traffic,
  Work as Work,
  blocking_seconds as blocking_seconds,
  collective_seconds as collective_seconds,
  data_parallel as data_parallel,
  exchange_ledger as exchange_ledger,
  hierarchical as hierarchical,
  layered_step as layered_step,
  ledger_seconds as ledger_seconds,
  overlapped_seconds as overlapped_seconds,
  predict_exchange as predict_exchange,
  ready_seconds as ready_seconds,
  seconds as seconds,
  traffic as traffic,
  unmeasured as unmeasured,
  work as work,
)
