"""What `experiments.bench_kernels` measures, and how."""
