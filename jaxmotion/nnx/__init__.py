"""Gradients and residuals of Flax NNX's modules, and their optimizer state.

Import it by its name, `import jaxmotion.nnx`: it is the one room that needs
Flax.
"""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.nnx._memory import (
  compress_residuals as compress_residuals,
  flatten_state as flatten_state,
)
from jaxmotion.nnx._value_and_grad import value_and_grad as value_and_grad

_set_public_module(__name__, globals())
