"""Reads traced and compiled programs, for all rooms that reason about them.

One flattener of jaxprs, one table of primitives, one reader of HLO, and the
memory of a compiled program. Users of the library need none of these names.
"""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.program._flatten import (
  Operand as Operand,
  Order as Order,
  Program as Program,
  Step as Step,
  Value as Value,
  array_bytes as array_bytes,
  describe_equation as describe_equation,
  evaluate as evaluate,
  find_varying as find_varying,
  flatten as flatten,
  follow_marks as follow_marks,
  has_barriers as has_barriers,
  has_effects as has_effects,
  inner_jaxprs as inner_jaxprs,
  is_sending as is_sending,
  open_jaxpr as open_jaxpr,
  read_operand as read_operand,
)
from jaxmotion.program._hlo import (
  HloModule as HloModule,
  Instruction as Instruction,
  device_bytes as device_bytes,
  parse_hlo as parse_hlo,
)
from jaxmotion.program._part_rules import (
  SUMMAND as SUMMAND,
  Part as Part,
  Workers as Workers,
)
from jaxmotion.program._parts import evaluate_parts as evaluate_parts
from jaxmotion.program._primitives import (
  ARITHMETIC as ARITHMETIC,
  AXIS_ONLY as AXIS_ONLY,
  CALLS as CALLS,
  COLLECTIVES as COLLECTIVES,
  CUMULATIVE as CUMULATIVE,
  LOOPS as LOOPS,
  MOVEMENT as MOVEMENT,
  RANDOM as RANDOM,
  REDUCTIONS as REDUCTIONS,
  SPECIAL as SPECIAL,
  TRANSCENDENTAL as TRANSCENDENTAL,
  VIEWS as VIEWS,
  WINDOW_PICKS as WINDOW_PICKS,
  WINDOWS as WINDOWS,
  ZERO_PRESERVING as ZERO_PRESERVING,
  collective_name as collective_name,
  is_discontinuous as is_discontinuous,
  is_expensive as is_expensive,
  is_float_equality as is_float_equality,
  writes_in_place as writes_in_place,
)

_set_public_module(__name__, globals())
