"""Programs compiled for an NVIDIA GPU that is not there: compiled, not run.

  JAX_PLATFORMS=cpu python ...

XLA's own compiler for GPUs runs on any machine; only its results do not. It
needs the extra `cuda-compile`, and JAX must be told before it starts that no
GPU is to be found: by JAX_PLATFORMS=cpu, or by `stay_on_the_host`.
"""

from experiments.gpu_compile.compile import (
  Compiled as Compiled,
  Memory as Memory,
  compile_for as compile_for,
  memory_for as memory_for,
  refusal as refusal,
  stay_on_the_host as stay_on_the_host,
)
from experiments.gpu_compile.hlo import Kernel as Kernel
from experiments.gpu_compile.ptx import Assembly as Assembly
from experiments.gpu_compile.targets import GPUS as GPUS
