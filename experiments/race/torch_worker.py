"""Worker that trains the decoder on one host with PyTorch's DDP."""

import functools
import statistics
from typing import Any

import jax
import torch
import torch.distributed as dist
from torch.nn import functional

from experiments.hosts import torch_worker
from experiments.race import cases, worker
from experiments.train.decoder import WEIGHT_DECAY, Batch, Shape, list_rates

_EPSILON = 1e-5  # Of layer norm.


def name_arrays(params: Any) -> dict[str, Any]:
  """Returns the arrays of a tree by their path, as in `block0/norm/scale`."""
  found, _ = jax.tree_util.tree_flatten_with_path(params)
  return {"/".join(key.key for key in path): array for path, array in found}


class Decoder(torch.nn.Module):
  """The network of `experiments.models.gpt` with the same arrays."""

  def __init__(self, params: Any, shape: Shape):
    super().__init__()
    self._layers, self._heads = shape.layers, shape.heads
    self.weights = torch.nn.ParameterDict(
      {
        name: torch.nn.Parameter(torch.tensor(array))
        for name, array in name_arrays(params).items()
      }
    )

  def forward(self, tokens: torch.Tensor) -> torch.Tensor:
    """Maps int64 `(batch, length)` to logits."""
    weights = self.weights
    x = functional.embedding(tokens, weights["embed/tokens"])
    x = x + weights["embed/places"]
    # One layer is no stack that has been unrolled.
    names = [f"blocks{i}" for i in range(self._layers)]
    for name in names if self._layers > 1 else ["blocks"]:
      x = x + self._attend(x, f"{name}/attention/body")
      x = x + self._perceive(x, f"{name}/perceptron/body")
    return self._normalize(x, "logits/norm") @ weights["logits/out/kernel"]

  def _attend(self, x: torch.Tensor, name: str) -> torch.Tensor:
    batch, length, channels = x.shape
    joined = self._project(self._normalize(x, f"{name}/norm"), f"{name}/qkv")
    parts = joined.view(batch, length, 3, self._heads, -1).unbind(2)
    q, k, v = (part.transpose(1, 2) for part in parts)
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    y = y.transpose(1, 2).reshape(batch, length, channels)
    return self._project(y, f"{name}/mix")

  def _perceive(self, x: torch.Tensor, name: str) -> torch.Tensor:
    y = self._project(self._normalize(x, f"{name}/norm"), f"{name}/up")
    return self._project(functional.gelu(y, approximate="tanh"), f"{name}/down")

  def _normalize(self, x: torch.Tensor, name: str) -> torch.Tensor:
    scale, bias = self.weights[f"{name}/scale"], self.weights[f"{name}/bias"]
    return functional.layer_norm(x, x.shape[-1:], scale, bias, _EPSILON)

  def _project(self, x: torch.Tensor, name: str) -> torch.Tensor:
    return x @ self.weights[f"{name}/kernel"] + self.weights[f"{name}/bias"]


def score_batch(module: torch.nn.Module, batch: Batch) -> torch.Tensor:
  """Returns the mean cross-entropy of a batch."""
  tokens, labels = (torch.from_numpy(part).long() for part in batch)
  logits = module(tokens)
  return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class TorchTrainer:
  """One case of PyTorch at its initial parameters."""

  def __init__(self, place: worker.Place, order: worker.Order):
    self._place, self._order = place, order
    self._rates = list_rates(order.rate, order.steps)
    self._start()
    # DDP regroups its buckets after the first step.
    for index in range(2):
      self.step(index)
    self.evaluate()
    params = self._start()
    total = cases.peer_bytes(order.case, params, order.steps)
    moves = [] if cases.is_alone(order.case) else [["all_reduce", total, 1]]
    self.facts = {"moves": moves, "share": 1}

  def step(self, index: int) -> float:
    """Takes a step, counted from 0, and returns the host's own loss."""
    for group in self._optimizer.param_groups:
      group["lr"] = float(self._rates[index])
    self._optimizer.zero_grad(set_to_none=True)
    batch = self._place.make_batch(self._order.seed, index)
    loss = score_batch(self._wrapped, batch)
    loss.backward()
    self._optimizer.step()
    return loss.item()

  def settle(self) -> None:
    """Waits for all that is under way on all hosts."""
    dist.barrier()

  def evaluate(self) -> float:
    """Returns the mean loss of the host's part of the held-out text."""
    tokens, labels = self._place.held_out()
    with torch.no_grad():
      losses = [
        score_batch(self._module, (tokens[i:j], labels[i:j])).item()
        for i, j in worker.cut_range(len(tokens))
      ]
    return statistics.fmean(losses)

  def _start(self) -> Any:
    """Makes module and optimizer, and returns the initial parameters."""
    params = self._place.decoder.make_params(self._order.seed)
    self._module = Decoder(params, self._place.decoder.shape)
    case = torch_worker.CASES[self._order.case]
    assert case.wrap is not None
    self._wrapped = case.wrap(self._module)
    adamw = functools.partial(torch.optim.AdamW, weight_decay=WEIGHT_DECAY)
    parameters = self._module.parameters()
    self._optimizer = case.make_optimizer(adamw, parameters, self._order.rate)
    return params


if __name__ == "__main__":
  worker.serve_parent(torch_worker.connect_hosts, TorchTrainer)
