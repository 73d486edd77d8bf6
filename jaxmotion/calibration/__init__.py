"""Measures what this machine does, for the predictions of `perfmodel`."""

from jaxmotion.calibration._calibrate import (
  calibrate_platform as calibrate_platform,
)
from jaxmotion.core import set_public_module as _set_public_module

_set_public_module(__name__, globals())
