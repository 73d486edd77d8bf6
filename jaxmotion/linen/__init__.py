"""Transforms of Flax Linen modules.

Import it by its name, `import jaxmotion.linen`: it needs Flax.
"""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.linen._compress_residuals import (
  compress_residuals as compress_residuals,
)

_set_public_module(__name__, globals())
