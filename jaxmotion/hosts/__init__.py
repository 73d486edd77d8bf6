"""Runs steps on CPU hosts: what XLA:CPU and gloo make necessary.

`StagedStep` runs any traced step as several programs, which send while others
compute. `Sending` tells exchanges what they do differently in such a step. The
other names write values apart, in place or in an order that XLA:CPU keeps.
"""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.hosts._sending import (
  AT_ONCE as AT_ONCE,
  Sending as Sending,
  check_sending as check_sending,
  mark_computed as mark_computed,
  mark_received as mark_received,
)
from jaxmotion.hosts._staged_step import (
  OVERLAPS as OVERLAPS,
  Sender as Sender,
  StagedStep as StagedStep,
  StepsInFlight as StepsInFlight,
  choose_overlap as choose_overlap,
)
from jaxmotion.hosts._xla_cpu import (
  RUN_ONCE as RUN_ONCE,
  choose_by_platform as choose_by_platform,
  make_apart as make_apart,
  pad_apart as pad_apart,
  schedule_after as schedule_after,
  slice_at as slice_at,
  stack_apart as stack_apart,
  take_apart as take_apart,
  unstack_apart as unstack_apart,
  update_in_place as update_in_place,
  write_apart as write_apart,
)

_set_public_module(__name__, globals())
