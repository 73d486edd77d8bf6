"""Composable compression transforms for data in motion in JAX training.

Add one line to an optax chain::

  tx = optax.chain(
    jaxmotion.exchange("data", codecs.uniform(bits=8)), optax.adamw(3e-4)
  )

A room is a subpackage, such as `codecs`. It is loaded when one of its names is
first used.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from jaxmotion import (
    calibration as calibration,
    checkpoint as checkpoint,
    codecs as codecs,
    collectives as collectives,
    controllers as controllers,
    hetero as hetero,
    islands as islands,
    memory as memory,
    monitor as monitor,
    perfmodel as perfmodel,
    planner as planner,
    presets as presets,
    testing as testing,
    transforms as transforms,
    wire as wire,
  )
  from jaxmotion.core import (
    HostAxes as HostAxes,
    Key as Key,
    PerWorker as PerWorker,
    Shared as Shared,
    Split as Split,
    make_key as make_key,
    state_specs as state_specs,
  )
  from jaxmotion.monitor import metrics as metrics
  from jaxmotion.transforms import (
    Scheme as Scheme,
    TrainState as TrainState,
    bind_mesh as bind_mesh,
    delayed as delayed,
    exchange as exchange,
    fully_sharded as fully_sharded,
    grad as grad,
    local_updates as local_updates,
    local_value_and_grad as local_value_and_grad,
    make_train_step as make_train_step,
    per_worker as per_worker,
    read_params as read_params,
    sharded as sharded,
    skip_nonfinite as skip_nonfinite,
    value_and_grad as value_and_grad,
  )

__version__ = "0.1.0.dev0"

# The names above at run time. A test compares both.
_ROOMS = (
  "calibration checkpoint codecs collectives controllers hetero islands memory "
  "monitor perfmodel planner presets testing transforms wire"
).split()
_NAMES = {
  "core": "HostAxes Key PerWorker Shared Split make_key state_specs".split(),
  "monitor": ["metrics"],
  "transforms": (
    "Scheme TrainState bind_mesh delayed exchange fully_sharded grad "
    "local_updates local_value_and_grad make_train_step "
    "per_worker read_params sharded skip_nonfinite value_and_grad"
  ).split(),
}
_ROOM_OF = {name: room for room, names in _NAMES.items() for name in names}
__all__ = sorted([*_ROOMS, *_ROOM_OF])


def __getattr__(name: str) -> Any:
  """Loads the room of a public name when it is first used."""
  if name in _ROOMS:
    return importlib.import_module(f"{__name__}.{name}")
  if name not in _ROOM_OF:
    # By the object Python finds the nearest name for the message.
    raise AttributeError(
      f"module {__name__!r} has no attribute {name!r}",
      name=name,
      obj=sys.modules[__name__],
    )
  room = importlib.import_module(f"{__name__}.{_ROOM_OF[name]}")
  # The next use finds the name without this function.
  globals()[name] = getattr(room, name)
  return globals()[name]


def __dir__() -> list[str]:
  """Lists all public names, those of rooms not yet loaded too."""
  return sorted({*globals(), *__all__})
