"""Published algorithms, set up from the parts of this library.

Each file is one algorithm, with its paper and where ours differs.
"""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.presets._demo import demo as demo
from jaxmotion.presets._dgc import dgc as dgc
from jaxmotion.presets._diloco import diloco as diloco
from jaxmotion.presets._ef21_sgdm import ef21_sgdm as ef21_sgdm
from jaxmotion.presets._lion import lion as lion
from jaxmotion.presets._muloco import muloco as muloco
from jaxmotion.presets._onebit_adam import onebit_adam as onebit_adam
from jaxmotion.presets._power_sgd import power_sgd as power_sgd
from jaxmotion.presets._sdp4bit import sdp4bit as sdp4bit
from jaxmotion.presets._signum import signum as signum
from jaxmotion.presets._sparse_loco import sparse_loco as sparse_loco
from jaxmotion.presets._streaming_diloco import (
  streaming_diloco as streaming_diloco,
)
from jaxmotion.presets._zeropp import zeropp as zeropp

_set_public_module(__name__, globals())
