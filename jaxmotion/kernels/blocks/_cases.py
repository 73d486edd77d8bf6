"""Small named cases of block ops, shared by tests and benchmarks."""

from typing import NamedTuple

import numpy as np

from jaxmotion.kernels import (
  _block_op,
  microscaling,
  quantize,
  rotate,
  sign,
  ternary,
)


class Case(NamedTuple):
  """An op and the form of an array to encode with it.

  Attributes:
    op: the quantizer.
    shape: shape of the array.
    dtype: dtype of the array.
    special: whether the array has NaN, infinities, subnormals and huge values.
  """

  op: _block_op.BlockOp
  shape: tuple[int, ...]
  dtype: str = "float32"
  special: bool = False

  def array(self, seed: int = 0) -> np.ndarray:
    """Returns normal values, of magnitudes that differ from block to block."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=self.shape) * 10.0 ** rng.integers(-3, 4, self.shape)
    flat = x.astype(np.float32).reshape(-1)
    if self.special:
      some = [np.nan, np.inf, -np.inf, 1e-42, -3e38, 2.0**127, -0.0]
      flat[7 :: flat.size // 8][: len(some)] = some[
        : len(flat[7 :: flat.size // 8])
      ]
    return flat.reshape(self.shape)


CASES = {
  "absmax1": Case(quantize.AbsmaxOp(bits=1, block=32), (16, 64)),
  "absmax3": Case(quantize.AbsmaxOp(bits=3, block=32), (16, 64)),
  "absmax4": Case(quantize.AbsmaxOp(bits=4, block=32), (16, 64)),
  "absmax8": Case(quantize.AbsmaxOp(bits=8, block=32), (16, 64)),
  "minmax2": Case(quantize.MinMaxOp(bits=2, block=32), (16, 64)),
  "minmax7": Case(quantize.MinMaxOp(bits=7, block=32), (16, 64)),
  "absmax8_stochastic": Case(
    quantize.AbsmaxOp(bits=8, block=32, stochastic=True), (16, 64)
  ),
  "minmax3_stochastic": Case(
    quantize.MinMaxOp(bits=3, block=32, stochastic=True), (16, 64)
  ),
  "absmax8_special": Case(
    quantize.AbsmaxOp(bits=8, block=32), (16, 64), special=True
  ),
  "minmax8_special": Case(
    quantize.MinMaxOp(bits=8, block=32), (16, 64), special=True
  ),
  "absmax4_bfloat16": Case(
    quantize.AbsmaxOp(bits=4, block=32), (16, 64), "bfloat16"
  ),
  # Blocks of 58 elements, padding at the end, tiles that exceed both.
  "absmax8_odd": Case(quantize.AbsmaxOp(bits=8, block=64), (37, 29)),
  "minmax6_odd": Case(quantize.MinMaxOp(bits=6, block=64), (37, 29)),
  "absmax8_vector": Case(quantize.AbsmaxOp(bits=8, block=32), (1000,)),
  "absmax8_groups": Case(quantize.AbsmaxOp(bits=8, block=16), (96, 64)),
  "sign": Case(sign.SignOp(block=32), (32, 64)),
  "sign_groups": Case(sign.SignOp(block=8), (96, 64)),
  "ternary": Case(ternary.TernaryOp(block=32), (20, 64)),
  "ternary_odd": Case(ternary.TernaryOp(block=32), (37, 29)),
  "ternary_threshold": Case(
    ternary.TernaryOp(block=32, stochastic=False), (20, 64)
  ),
  **{
    f"mx_{name}": Case(
      microscaling.MicroscalingOp(format=name, block=32), (16, 64)
    )
    for name in microscaling.FORMATS
  },
  "mx_special": Case(
    microscaling.MicroscalingOp(format="float4_e2m1fn", block=32),
    (16, 64),
    special=True,
  ),
  "rotated_absmax4": Case(
    rotate.RotateOp(op=quantize.AbsmaxOp(bits=4, block=128), length=32, seed=3),
    (16, 64),
  ),
  "rotated_mx4": Case(
    rotate.RotateOp(
      op=microscaling.MicroscalingOp(format="float4_e2m1fn", block=32),
      length=32,
      seed=3,
    ),
    (16, 64),
  ),
}
