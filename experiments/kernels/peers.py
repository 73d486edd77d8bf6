"""Ops of other libraries for the same purpose, on the same data.

A peer gets the layout that suits it, and the memory of its outputs in advance
wherever it can write to given memory.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.common import timing
from jaxmotion.core import Array

# Elements under one scale.
_BLOCK = 512


class _Peer(NamedTuple):
  """One function of another library."""

  name: str  # Name of the function in the rows.
  package: str  # Package that has to be installed.
  backends: tuple[str, ...]  # JAX backends that it runs beside.
  # Function from the array to the call that is timed.
  make: Callable[[Array], timing.TimedCalls]


def build_peers(op: str, x: Array) -> dict[str, timing.TimedCalls]:
  """Returns the peers of an op that are installed and run here, by name."""
  return {
    peer.name: peer.make(x)
    for peer in _PEERS.get(op, ())
    if jax.default_backend() in peer.backends
    and importlib.util.find_spec(peer.package)
  }


def _repeat_calls(
  once: Callable[[], Any], wait: Callable[[], Any]
) -> timing.TimedCalls:
  def run_calls(calls: int) -> None:
    for _ in range(calls):
      once()
    wait()

  return run_calls


def _make_slices(
  library: str, count: int
) -> Callable[[Array], timing.TimedCalls]:
  """Copies the leading bytes of every word, as a strided slice."""

  def make_timed(x: Array) -> timing.TimedCalls:
    xp = importlib.import_module(library)
    words = xp.from_dlpack(x).reshape(-1, 1)
    # Two bytes are half a word.
    parts = words.view(np.uint16) if count == 2 else words.view(np.uint8)
    kept = parts[:, 1:] if count == 2 else parts[:, 4 - count :]
    target = xp.empty(kept.shape, kept.dtype)
    wait = getattr(xp, "cuda", None)
    return _repeat_calls(
      lambda: xp.copyto(target, kept),
      wait.Device().synchronize if wait else lambda: None,
    )

  return make_timed


def _make_torch_cast(dtype: str) -> Callable[[Array], timing.TimedCalls]:
  def make_timed(x: Array) -> timing.TimedCalls:
    torch, source = _import_torch(x)
    target = torch.empty_like(source, dtype=getattr(torch, dtype))
    return _time_torch(torch, lambda: target.copy_(source))

  return make_timed


def _time_torch_per_channel(x: Array) -> timing.TimedCalls:
  """Times PyTorch's codes under scales that are computed in advance."""
  torch, source = _import_torch(x)
  rows = source.reshape(-1, _BLOCK)
  scales = rows.abs().amax(1) / 127
  zeros = torch.zeros(rows.shape[0], dtype=torch.long)
  args = (rows, scales, zeros, 0, torch.qint8)
  with warnings.catch_warnings():
    # Deprecated, but PyTorch has no other.
    warnings.simplefilter("ignore", UserWarning)
    target = torch.quantize_per_channel(*args)
  write = torch.ops.aten.quantize_per_channel.out
  return _time_torch(torch, lambda: write(*args, out=target))


def _time_torch_absmax(x: Array) -> timing.TimedCalls:
  """Times codes and scales of blocks, one compiled function of PyTorch."""
  torch, source = _import_torch(x)

  def encode(rows: Any) -> tuple[Any, Any]:
    scale = rows.abs().amax(1, keepdim=True) / 127
    return (rows / scale).round().to(torch.int8), scale

  return _time_compiled_torch(torch, encode, source.reshape(-1, _BLOCK))


def _make_torch_topk(block: int) -> Callable[[Array], timing.TimedCalls]:
  """Times PyTorch's largest magnitude of each block and its position."""

  def make_timed(x: Array) -> timing.TimedCalls:
    torch, source = _import_torch(x)
    rows = source.reshape(-1)[: source.numel() // block * block]
    select = lambda rows: torch.topk(rows.abs(), 1, dim=1)
    return _time_compiled_torch(torch, select, rows.reshape(-1, block))

  return make_timed


def _make_bitsandbytes(name: str) -> Callable[[Array], timing.TimedCalls]:
  """Times bitsandbytes' codes of a table of levels, scaled to each block."""

  def make_timed(x: Array) -> timing.TimedCalls:
    torch, source = _import_torch(x)
    functional = importlib.import_module("bitsandbytes.functional")
    encode = getattr(functional, name)
    return _time_torch(torch, lambda: encode(source, blocksize=_BLOCK))

  return make_timed


def _time_torchao_mx(x: Array) -> timing.TimedCalls:
  torch, source = _import_torch(x)
  formats = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
  encode = lambda rows: formats.to_mx(rows, torch.float8_e4m3fn, 32)
  return _time_compiled_torch(torch, encode, source)


def _import_torch(x: Array) -> tuple[Any, Any]:
  torch = importlib.import_module("torch")
  return torch, torch.from_dlpack(x)


def _time_compiled_torch(
  torch: Any, fn: Callable, rows: Any
) -> timing.TimedCalls:
  if rows.is_cuda:
    # Each size is compiled as a function of its own.
    torch.compiler.reset()
    fn = torch.compile(fn, dynamic=False)
  return _time_torch(torch, lambda: fn(rows))


def _time_torch(torch: Any, once: Callable[[], Any]) -> timing.TimedCalls:
  on_gpu = jax.default_backend() == "gpu"
  return _repeat_calls(once, torch.cuda.synchronize if on_gpu else lambda: None)


_HOST, _GPU, _BOTH = ("cpu",), ("gpu",), ("cpu", "gpu")
_PEERS: dict[str, list[_Peer]] = {
  **{
    dtype: [_Peer("torch_copy", "torch", _BOTH, _make_torch_cast(dtype))]
    for dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
  },
  **{
    f"truncate{count}": [
      _Peer("numpy_slices", "numpy", _HOST, _make_slices("numpy", count)),
      _Peer("cupy_slices", "cupy", _GPU, _make_slices("cupy", count)),
    ]
    for count in (1, 2, 3)
  },
  "int8": [
    _Peer("torch_per_channel", "torch", _HOST, _time_torch_per_channel),
    _Peer("torch_absmax", "torch", _GPU, _time_torch_absmax),
    _Peer(
      "bitsandbytes",
      "bitsandbytes",
      _BOTH,
      _make_bitsandbytes("quantize_blockwise"),
    ),
  ],
  "int4": [
    _Peer(
      "bitsandbytes", "bitsandbytes", _BOTH, _make_bitsandbytes("quantize_4bit")
    )
  ],
  "mxfp8": [_Peer("torchao", "torchao", _BOTH, _time_torchao_mx)],
  "top1of128": [_Peer("torch_topk", "torch", _BOTH, _make_torch_topk(128))],
}
