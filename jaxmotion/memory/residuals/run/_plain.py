"""Backward pass of a function whose residuals the compiler chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxmotion import program
from jaxmotion.core import Array
from jaxmotion.memory.residuals import choose
from jaxmotion.memory.residuals.run import _forward


def run_plain(
  selection: choose.Selection,
  inputs: Sequence[Array | None],
  buffers: Sequence[choose.Buffers],
  cotangents: Sequence[Array],
) -> list[Any]:
  """Computes the gradients from values that were kept as they are."""
  joint = selection.joint
  env = _forward.make_env(selection, list_live(selection, inputs))
  env.update(zip(joint.cotangents, cotangents, strict=True))
  kept = zip(selection.plain or (), buffers, strict=True)
  env.update((value, buffer) for value, (buffer,) in kept)
  program.evaluate(joint.backward_steps(), env)
  return [
    None if g is None else program.read_operand(env, g) for g in joint.gradients
  ]


def list_live(
  selection: choose.Selection, inputs: Sequence[Array | None]
) -> list[tuple[program.Value, Any]]:
  """Returns the inputs that are always live, with their values."""
  pairs = zip(selection.joint.inputs, inputs, strict=True)
  return [pair for pair in pairs if pair[0] in selection.always_live]
