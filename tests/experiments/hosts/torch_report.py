"""A worker whose facts are the parameters that a case has trained."""

from experiments.hosts import torch_worker, worker


class Report(torch_worker.TorchBackend):
  warm_up = 0

  def prepare(self, case):
    import torch

    chosen = torch_worker.CASES[case]
    module = chosen.wrap(torch_worker._make_layers(self._arguments.widths))
    step = torch_worker._make_step(chosen, module, self._arguments)
    for _ in range(2 * super().warm_up):
      step()
    whole = [
      p.full_tensor() if hasattr(p, "full_tensor") else p
      for p in module.parameters()
    ]
    params = torch.cat([p.detach().flatten() for p in whole]).tolist()
    return int, {"params": params}


if __name__ == "__main__":
  arguments = worker.parse_arguments()
  worker.serve_parent(Report(arguments), arguments.interface)
