"""What a training step will cost, before anything runs.

A `Platform` says what the devices and links can do, `cost` what any JAX
function takes, `predict_exchange` what moving its gradients takes with any
codec, and `data_parallel` and `layered_step` put them together. Everything is
predicted, from shapes: nothing is measured or run.
"""

from jaxmotion.perfmodel._codec_time import (
  decode_seconds as decode_seconds,
  encode_seconds as encode_seconds,
)
from jaxmotion.perfmodel._collectives import (
  Traffic as Traffic,
  collective_seconds as collective_seconds,
  hierarchical as hierarchical,
  ledger_seconds as ledger_seconds,
  traffic as traffic,
)
from jaxmotion.perfmodel._cost import Cost as Cost, Total as Total
from jaxmotion.perfmodel._count import cost as cost
from jaxmotion.perfmodel._exchange import (
  Exchange as Exchange,
  exchange_ledger as exchange_ledger,
  predict_exchange as predict_exchange,
)
from jaxmotion.perfmodel._file import (
  load_platform as load_platform,
  platform_from_dict as platform_from_dict,
  platform_to_dict as platform_to_dict,
  save_platform as save_platform,
)
from jaxmotion.perfmodel._kernels import Kernel as Kernel
from jaxmotion.perfmodel._layered import layered_step as layered_step
from jaxmotion.perfmodel._measured import Curve as Curve
from jaxmotion.perfmodel._network import (
  IMAGES as IMAGES,
  LABELS as LABELS,
  Layer as Layer,
  Network as Network,
)
from jaxmotion.perfmodel._overlap import (
  Message as Message,
  blocking_seconds as blocking_seconds,
  overlapped_seconds as overlapped_seconds,
)
from jaxmotion.perfmodel._platform import (
  Axis as Axis,
  Device as Device,
  Link as Link,
  Platform as Platform,
)
from jaxmotion.perfmodel._roofline import (
  curve_of as curve_of,
  kernel_seconds as kernel_seconds,
  ready_seconds as ready_seconds,
  seconds as seconds,
)
from jaxmotion.perfmodel._shipped import shipped as shipped
from jaxmotion.perfmodel._steps import (
  Step as Step,
  Work as Work,
  data_parallel as data_parallel,
  work as work,
)
from jaxmotion.perfmodel._units import (
  Rate as Rate,
  gbit_per_s as gbit_per_s,
  gbyte_per_s as gbyte_per_s,
)
from jaxmotion.perfmodel._unmeasured import unmeasured as unmeasured
from jaxmotion.perfmodel._zoo import zoo as zoo
