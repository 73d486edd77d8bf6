"""A worker whose facts are what a case has trained, or how it failed."""

from experiments.hosts import torch_worker, worker


def stock_hooks():
  from torch.distributed.algorithms import ddp_comm_hooks as hooks

  return {
    "bf16": hooks.default_hooks.bf16_compress_hook,
    "quantization": hooks.quantization_hooks.quantization_pertensor_hook,
  }


class Report(torch_worker.TorchBackend):
  warm_up = 0

  def prepare(self, case):
    hook = stock_hooks().get(case)
    if hook is None:
      return int, {"params": self.train(torch_worker.CASES[case])}
    try:
      self.train(
        torch_worker.PeerCase("", lambda m: torch_worker._wrap_ddp(m, hook))
      )
    except Exception as error:
      return int, {"failure": f"{type(error).__name__}: {error}"}
    return int, {}

  def train(self, case):
    import torch

    module = case.wrap(torch_worker._make_layers(self._arguments.widths))
    step = torch_worker._make_step(case, module, self._arguments)
    for _ in range(2 * super().warm_up):
      step()
    whole = [
      p.full_tensor() if hasattr(p, "full_tensor") else p
      for p in module.parameters()
    ]
    return torch.cat([p.detach().flatten() for p in whole]).tolist()


if __name__ == "__main__":
  arguments = worker.parse_arguments()
  worker.serve_parent(Report(arguments), arguments.interface)
