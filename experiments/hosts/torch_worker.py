"""Worker that trains the MLP with PyTorch: one DDP process a host, on gloo.

`CASES` can be imported where torch is not installed.
"""

import argparse
import datetime
import functools
import itertools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.hosts import worker

if TYPE_CHECKING:
  import torch

# For the start of all hosts, and for one collective.
_TIMEOUT = datetime.timedelta(seconds=60)
_POWERSGD_START = 2
# MiB, more than any model here, so that one bucket holds all gradients.
_ONE_BUCKET = 100_000


LOCAL_EVERY = 8
"""Steps between two averages of post-local SGD, and steps before them."""


class PeerCase(NamedTuple):
  """One way of exchanging gradients with PyTorch."""

  about: str  # Short description.
  # Function from the plain module to the one that trains; None if gloo cannot
  # run the case.
  wrap: "Callable[[torch.nn.Module], torch.nn.Module] | None"
  reason: str = ""  # Why gloo cannot run the case.
  # Makes the optimizer from its class, the parameters and the learning rate.
  make_optimizer: "Callable[..., torch.optim.Optimizer]" = (
    lambda kind, parameters, lr: kind(parameters, lr=lr)
  )
  every: int = 1  # Steps between two exchanges.


def _wrap_ddp(
  module: "torch.nn.Module",
  hook: Callable[..., Any] | None = None,
  state: Any = None,
  bucket_cap_mb: int | None = None,
) -> "torch.nn.Module":
  """Wraps `module` in DDP, with `hook` in place of its own all-reduce."""
  from torch.nn.parallel import DistributedDataParallel

  wrapped = DistributedDataParallel(
    module, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True
  )
  if hook is not None:
    wrapped.register_comm_hook(state, hook)
  return wrapped


def _wrap_fp16(module: "torch.nn.Module") -> "torch.nn.Module":
  from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

  return _wrap_ddp(module, default_hooks.fp16_compress_hook)


def _wrap_bf16(module: "torch.nn.Module") -> "torch.nn.Module":
  """Wraps `module` in DDP with the arithmetic of PyTorch's bf16 hook."""
  # DDP refuses that hook without NCCL.
  import torch
  import torch.distributed as dist

  # DDP checks the name and the type of `bucket`, and the type returned.
  def hook(
    state: None, bucket: dist.GradBucket
  ) -> torch.futures.Future[torch.Tensor]:
    del state
    buffer = bucket.buffer()
    small = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(small, async_op=True)
    return work.get_future().then(lambda done: buffer.copy_(done.value()[0]))

  return _wrap_ddp(module, hook)


def _wrap_powersgd(module: "torch.nn.Module", rank: int) -> "torch.nn.Module":
  """Wraps `module` in DDP with PowerSGD and a single bucket."""
  # PowerSGD starts collectives in callbacks. With two buckets, two hosts may
  # run the callbacks in different orders. Gloo pairs collectives by their
  # order, so it would hang or fail.
  from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

  state = powerSGD_hook.PowerSGDState(
    process_group=None,
    matrix_approximation_rank=rank,
    start_powerSGD_iter=_POWERSGD_START,
  )
  return _wrap_ddp(
    module, powerSGD_hook.powerSGD_hook, state, bucket_cap_mb=_ONE_BUCKET
  )


def _wrap_fsdp2(module: "torch.nn.Module") -> "torch.nn.Module":
  """Shards every linear layer, and what is left, over all hosts."""
  import torch
  from torch.distributed.device_mesh import init_device_mesh
  from torch.distributed.fsdp import fully_shard

  mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
  for layer in module.children():
    if isinstance(layer, torch.nn.Linear):
      fully_shard(layer, mesh=mesh)
  fully_shard(module, mesh=mesh)
  return module


def _make_zero_optimizer(
  kind: "type[torch.optim.Optimizer]", parameters: Any, lr: float
) -> "torch.optim.Optimizer":
  """Returns an optimizer whose state is cut into parts, one a host."""
  from torch.distributed.optim import ZeroRedundancyOptimizer

  return ZeroRedundancyOptimizer(parameters, kind, lr=lr)


def _wrap_post_local(module: "torch.nn.Module") -> "torch.nn.Module":
  """Wraps `module` in DDP, which sums no gradients after its first steps."""
  from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook

  state = post_localSGD_hook.PostLocalSGDState(
    process_group=None,
    subgroup=None,
    start_localSGD_iter=LOCAL_EVERY,
    post_local_gradient_allreduce=False,
  )
  return _wrap_ddp(module, post_localSGD_hook.post_localSGD_hook, state)


def _make_post_local_optimizer(
  kind: "Callable[..., torch.optim.Optimizer]", parameters: Any, lr: float
) -> "torch.optim.Optimizer":
  """Returns an optimizer that averages parameters every `LOCAL_EVERY` steps."""
  from torch.distributed.algorithms.model_averaging import averagers
  from torch.distributed.optim import PostLocalSGDOptimizer

  # It counts from 0, so that this averages after the last step of each period.
  averager = averagers.PeriodicModelAverager(
    period=LOCAL_EVERY, warmup_steps=LOCAL_EVERY - 1
  )
  return PostLocalSGDOptimizer(kind(parameters, lr=lr), averager)


CASES = {
  "torch_none": PeerCase("no exchange, no DDP", lambda module: module),
  "torch_fp32": PeerCase("DDP, default buckets", _wrap_ddp),
  "torch_fp16": PeerCase("DDP, fp16_compress_hook", _wrap_fp16),
  "torch_bf16": PeerCase(
    "DDP, an own hook that all-reduces bfloat16", _wrap_bf16
  ),
  **{
    f"torch_powersgd{rank}": PeerCase(
      f"DDP, powerSGD_hook of rank {rank}, one bucket",
      functools.partial(_wrap_powersgd, rank=rank),
    )
    for rank in (1, 2, 4)
  },
  "torch_zero": PeerCase(
    "DDP, ZeroRedundancyOptimizer",
    _wrap_ddp,
    make_optimizer=_make_zero_optimizer,
  ),
  "torch_post_local": PeerCase(
    "DDP, post_localSGD_hook and PostLocalSGDOptimizer",
    _wrap_post_local,
    make_optimizer=_make_post_local_optimizer,
    every=LOCAL_EVERY,
  ),
  "torch_fsdp2": PeerCase("FSDP2, a unit a layer", _wrap_fsdp2),
  "torch_quantization": PeerCase(
    "DDP, quantization_pertensor_hook",
    None,
    "quantization_pertensor_hook fails on gloo in its callback: IndexError: "
    "invalid index of a 0-dim tensor (it takes a nested list of tensors out "
    "of all_gather's future, gloo gives a flat one)",
  ),
}


def _make_layers(widths: list[int]) -> "torch.nn.Module":
  """Returns linear layers with ReLUs between them, the same on every host."""
  import torch

  torch.manual_seed(0)
  layers: list[torch.nn.Module] = []
  for fan_in, fan_out in itertools.pairwise(widths):
    layers += [torch.nn.Linear(fan_in, fan_out), torch.nn.ReLU()]
  return torch.nn.Sequential(*layers[:-1])


def _make_step(
  case: PeerCase, module: "torch.nn.Module", args: argparse.Namespace
) -> Callable[[], float]:
  """Returns the training step of a wrapped `module`, which returns the loss."""
  import torch

  kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[args.optimizer]
  optimizer = case.make_optimizer(
    kind, module.parameters(), lr=worker.OPTIMIZERS[args.optimizer]
  )
  random = torch.Generator().manual_seed(1 + args.rank)
  x = torch.randn(args.batch, args.widths[0], generator=random)
  y = torch.randint(args.widths[-1], (args.batch,), generator=random)

  def step() -> float:
    optimizer.zero_grad(set_to_none=True)
    loss = torch.nn.functional.cross_entropy(module(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()

  return step


def connect_hosts(arguments: argparse.Namespace) -> None:
  """Connects this process to the other hosts."""
  try:
    import torch
    import torch.distributed as dist
  except ModuleNotFoundError:
    raise worker.Unsupported("torch is not installed") from None
  os.environ["GLOO_SOCKET_IFNAME"] = arguments.interface
  torch.set_num_threads(os.cpu_count() or 1)
  dist.init_process_group(
    "gloo",
    init_method=f"tcp://{arguments.coordinator}",
    rank=arguments.rank,
    world_size=arguments.hosts,
    timeout=_TIMEOUT,
  )


class TorchBackend:
  """Backend of hosts that `torch.distributed` connects, one process each."""

  # DDP regroups its buckets after the first step, and PowerSGD compresses
  # from its third step on.
  warm_up = 4

  def __init__(self, arguments: argparse.Namespace):
    self._arguments = arguments

  def connect(self) -> None:
    """Connects to the other hosts."""
    connect_hosts(self._arguments)

  def barrier(self) -> None:
    """Waits until all hosts call it."""
    import torch.distributed as dist

    dist.barrier()

  def prepare(self, case: str) -> tuple[Callable[[], float], dict[str, Any]]:
    """Returns the step of one of `CASES`."""
    chosen = CASES[case]
    if chosen.wrap is None:
      raise worker.Unsupported(chosen.reason)
    module = chosen.wrap(_make_layers(self._arguments.widths))
    step = _make_step(chosen, module, self._arguments)
    return step, {"period": chosen.every}


def main() -> None:
  """Runs the parent's commands until it says quit."""
  arguments = worker.parse_arguments()
  worker.serve_parent(TorchBackend(arguments), arguments.interface)


if __name__ == "__main__":
  main()
