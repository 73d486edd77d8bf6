"""Parts of `jax.extend`, loaded when one of their names is first used.

`import jax.extend` loads Pallas, which takes as long as all modules of the
quickstart together. Only programs that are traced need it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any


def _load_core() -> Any:
  """Loads the types of jaxprs."""
  from jax.extend import core

  return core


def _load_source_info() -> Any:
  """Loads the names that profiles show."""
  from jax.extend import source_info_util

  return source_info_util


class _LateModule:
  """Stands for a module until one of its names is used.

  >>> late = _LateModule(lambda: math)
  >>> import math
  >>> late.gcd(4, 6)
  2
  """

  def __init__(self, load: Callable[[], Any]):
    self._load = load

  def __getattr__(self, name: str) -> Any:
    """Loads the module and returns one of its names."""
    value = getattr(self._load(), name)
    # The next use finds the name without this function.
    setattr(self, name, value)
    return value


if TYPE_CHECKING:
  from jax.extend import core, source_info_util as source_info_util

  jax_core = core
else:
  jax_core = _LateModule(_load_core)
  source_info_util = _LateModule(_load_source_info)
