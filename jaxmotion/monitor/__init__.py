"""Numbers of a training step to log: bytes, ratio, errors, skipped steps."""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.monitor._metrics import metrics as metrics

_set_public_module(__name__, globals())
