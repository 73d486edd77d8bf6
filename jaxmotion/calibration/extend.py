"""Second tier of calibrations, for jobs of several processes.

Users of calibrations need none of these names.
"""

from jaxmotion.calibration._calibrate import (
  make_platform as make_platform,
  prepare_timer as prepare_timer,
)
from jaxmotion.calibration._links import (
  drop_axes as drop_axes,
  measure_links as measure_links,
)
from jaxmotion.calibration._probes import (
  ProbeTimer as ProbeTimer,
  make_mesh as make_mesh,
  robust_seconds as robust_seconds,
)
from jaxmotion.core import set_public_module as _set_public_module

_set_public_module(__name__, globals())
