"""What `experiments.kernels` measures, and how."""
