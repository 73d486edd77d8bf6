"""Passes over blocks: the implementation is chosen here."""

from jaxmotion.core import Array, Key, PyTree, ShapedLike
from jaxmotion.kernels._block_op import BlockOp
from jaxmotion.kernels._dispatch import run
from jaxmotion.kernels._error_memory import ErrorMemory

# Compiled for an H100, XLA reads its input for the scales and again for the
# codes, writes the sum with the error in between, and copies each worker's part
# of the payloads before it adds them up.
_GPU = ("pallas_triton",)


def encode(
  op: BlockOp,
  x: Array,
  key: Key | None = None,
  *,
  implementation: str | None = None,
) -> PyTree:
  """Encodes an array: one pass that reads it and writes its payload.

  Args:
    op: the quantiser.
    x: floating array of any shape.
    key: randomness, for an op that draws.
    implementation: name of the only one to try; None chooses.

  Returns:
    The op's payload: the same bits from every implementation, but for scales
    that are sums (of `Sign` and the threshold of `Ternary`), which are added
    up in another order.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion.kernels.quantize import AbsmaxOp
    >>> op = AbsmaxOp(bits=8, block=2)
    >>> encode(op, jnp.array([1.0, 2.0, 3.0, 4.0])).words.shape
    (1, 1, 1)
  """
  return run(
    "blocks",
    "encode",
    x,
    key,
    gpu=_GPU,
    implementation=implementation,
    op=op,
  )


def encode_error(
  op: BlockOp,
  x: Array,
  memory: ErrorMemory,
  key: Key | None = None,
  *,
  decay: float = 1.0,
  implementation: str | None = None,
) -> tuple[PyTree, Array]:
  """Encodes an array plus its remembered error, in one pass.

  Args:
    op: the quantiser.
    x: floating array of any shape.
    memory: of that array; `sent` is a payload of this op.
    key: randomness, for an op that draws.
    decay: factor on the error.
    implementation: name of the only one to try; None chooses.

  Returns:
    The payload and the value it encodes, float32; they take the memory of
    `memory` if that is donated.
  """
  return run(
    "blocks",
    "encode_error",
    x,
    memory,
    key,
    gpu=_GPU,
    implementation=implementation,
    op=op,
    decay=decay,
  )


def sum_decoded(
  op: BlockOp,
  payloads: PyTree,
  like: ShapedLike,
  *,
  implementation: str | None = None,
) -> Array:
  """Decodes payloads of several workers and adds them, in one pass.

  Args:
    op: the quantiser.
    payloads: a payload whose leaves have a leading axis of workers.
    like: shape and dtype of the array that each of them encoded.
    implementation: name of the only one to try; None chooses.

  Returns:
    The sum in the order of workers, in float32 or the wider dtype of `like`.
  """
  return run(
    "blocks",
    "sum_decoded",
    payloads,
    gpu=_GPU,
    implementation=implementation,
    op=op,
    like=like,
  )


def encode_mean(
  op: BlockOp,
  payloads: PyTree,
  like: ShapedLike,
  key: Key | None = None,
  *,
  implementation: str | None = None,
) -> PyTree:
  """Encodes the mean of what several workers' payloads decode to.

  Args:
    op: the quantiser.
    payloads: a payload whose leaves have a leading axis of workers.
    like: shape and dtype of the array that each of them encoded.
    key: randomness, for an op that draws.
    implementation: name of the only one to try; None chooses.

  Returns:
    One payload.
  """
  return run(
    "blocks",
    "encode_mean",
    payloads,
    key,
    gpu=_GPU,
    implementation=implementation,
    op=op,
    like=like,
  )
