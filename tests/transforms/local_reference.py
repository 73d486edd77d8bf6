"""Local updates in NumPy, float64: an independent reference."""

import numpy as np


def make_params(seed=0):
  rng = np.random.default_rng(seed)
  shapes = {"kernel": (5, 4), "scale": (1, 4), "shift": (2, 1, 4)}
  return {
    name: rng.normal(0, 0.5, shape).astype(np.float32)
    for name, shape in shapes.items()
  }


def make_batch(seed, rows):
  rng = np.random.default_rng(100 + seed)
  x, y = rng.normal(size=(rows, 5)), rng.normal(size=(rows, 4))
  tokens = rng.integers(1, 9, rows)
  return {
    "x": x.astype(np.float32),
    "y": y.astype(np.float32),
    "tokens": tokens.astype(np.float32),
  }


def value_and_grad(params, batch):
  """Loss mean(((x kernel + sum(shift)) scale - y)^2) and its gradient."""
  x, y = batch["x"].astype(np.float64), batch["y"].astype(np.float64)
  h = x @ params["kernel"] + params["shift"].sum((0, 1))
  error = h * params["scale"] - y
  d = 2 * error / error.size
  dh = d * params["scale"]
  return (error**2).mean(), {
    "kernel": x.T @ dh,
    "scale": (d * h).sum(0, keepdims=True),
    "shift": np.broadcast_to(dh.sum(0), params["shift"].shape).copy(),
  }


class Momentum:
  """Gradient descent with momentum, of one worker."""

  def __init__(self, rate, momentum=0.9):
    self.rate, self.momentum, self.trace = rate, momentum, {}

  def update(self, params, grads):
    for name, g in grads.items():
      self.trace[name] = g + self.momentum * self.trace.get(name, 0)
      params[name] = params[name] - self.rate * self.trace[name]


def train(
  params,
  batches,
  *,
  workers,
  every,
  fragments=1,
  delay=0,
  mix=0.0,
  rate=0.02,
  outer_rate=0.7,
  momentum=0.9,
  weighted=False,
):
  """Returns the anchor and each worker's parameters after all batches."""
  anchor = {name: a.astype(np.float64) for name, a in params.items()}
  own = [dict(anchor) for _ in range(workers)]
  optimizers = [Momentum(rate) for _ in range(workers)]
  buffers = {name: 0.0 for name in anchor}
  weights = np.zeros((fragments, workers))
  flying = {}
  largest_first = sorted(anchor, key=lambda name: -anchor[name].size)
  gap = every // fragments
  for t, batch in enumerate(batches, 1):
    rows = len(batch["x"]) // workers
    for r in range(workers):
      part = {k: a[r * rows : (r + 1) * rows] for k, a in batch.items()}
      _, grads = value_and_grad(own[r], part)
      optimizers[r].update(own[r], grads)
      weights[:, r] += part["tokens"].sum() if weighted else 1
    if t % gap == 0:
      k = (t // gap - 1) % fragments
      share = weights[k] / weights[k].sum()
      weights[k] = 0
      for name in largest_first[k::fragments]:
        d = sum(
          share[r] * (anchor[name] - own[r][name]) for r in range(workers)
        )
        buffers[name] = momentum * buffers[name] + d
        step = d + momentum * buffers[name]
        flying[name] = anchor[name] - outer_rate * step
    landed = t - delay
    if landed > 0 and landed % gap == 0:
      k = (landed // gap - 1) % fragments
      for name in largest_first[k::fragments]:
        anchor[name] = flying[name]
        for r in range(workers):
          own[r][name] = mix * own[r][name] + (1 - mix) * anchor[name]
  return anchor, own
