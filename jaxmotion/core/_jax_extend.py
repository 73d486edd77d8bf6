"""Parts of `jax.extend`, loaded when one of their names is first used.

`import jax.extend` loads Pallas, which takes as long as all modules of the
quickstart together. Only programs that are traced need it.
"""

from typing import TYPE_CHECKING, Any


class _LateModule:
  """Stands for a module of `jax.extend` until one of its names is used.

  >>> _LateModule("core").Literal.__name__
  'Literal'
  """

  def __init__(self, module: str):
    self._module = module

  def __getattr__(self, name: str) -> Any:
    """Loads the module and returns one of its names."""
    from jax import extend

    value = getattr(getattr(extend, self._module), name)
    # The next use finds the name without this function.
    setattr(self, name, value)
    return value


if TYPE_CHECKING:
  from jax.extend import core, source_info_util as source_info_util

  jax_core = core
else:
  jax_core = _LateModule("core")
  source_info_util = _LateModule("source_info_util")
