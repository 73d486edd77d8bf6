"""Trains on the workers of a Ray cluster.

  python -m examples.cluster.ray_trainer

Ray starts a process for each worker and calls `jax.distributed.initialize` in
it, so that `train` alone remains. It needs `pip install "ray[train]"`, of a
version whose JaxTrainer takes GPUs; older ones take TPUs alone.
"""

from ray.train import ScalingConfig
from ray.train.v2.jax import JaxTrainer

from examples.cluster.train import train


def main():
  """Starts the workers and waits for them."""
  scaling = ScalingConfig(num_workers=2, use_gpu=True)
  JaxTrainer(lambda: train(), scaling_config=scaling).fit()


if __name__ == "__main__":
  main()
