"""Options of a host-resident model in the form that its step reads."""

from typing import NamedTuple

import jax
import optax

from jaxmotion import codecs
from jaxmotion.memory.weights import _programs


class ModelSpec(NamedTuple):
  """Resolved options of a `HostResident`.

  Attributes:
    functions: one per stage, all of one signature.
    names: names of the stages, for error messages.
    tx: optax transformation.
    level_codecs: codec of the weights at each level.
    grad_codec: codec of the gradients.
    send_difference: whether weights travel as differences to a reference.
    stream_weights: whether weights are sent again for the backward pass.
    is_per_stage: whether each stage is updated by itself.
    seed: seed of stochastic rounding.
    device_dtype: dtype of the weights on the device.
    host: JAX device of the CPU backend, which holds weights and optimizer.
    device: JAX device that computes.
  """

  functions: tuple[_programs.StageFunction, ...]
  names: tuple[str, ...]
  tx: optax.GradientTransformation
  level_codecs: tuple[codecs.Codec, ...]
  grad_codec: codecs.Codec
  send_difference: bool
  stream_weights: bool
  is_per_stage: bool
  seed: int
  device_dtype: str
  host: jax.Device
  device: jax.Device
