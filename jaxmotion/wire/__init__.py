"""Counts the bytes that payloads, steps and compiled programs send.

`step_bytes` counts what a traced function asks to send; `compiled_bytes`
counts what the compiler's program really sends. Where they differ, the
compiler has changed a dtype or added a collective.
"""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.wire._compiled import compiled_bytes as compiled_bytes
from jaxmotion.wire._ledger import Ledger as Ledger, Move as Move
from jaxmotion.wire._step import (
  payload_bytes as payload_bytes,
  step_bytes as step_bytes,
)

_set_public_module(__name__, globals())
