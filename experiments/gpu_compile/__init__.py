"""Compiles programs for an NVIDIA GPU that is not there, without running them.

XLA's compiler for GPUs works on any machine; only its programs do not. It needs
the extra `cuda-compile`, and JAX must be told before it starts that it will
find no GPU: by JAX_PLATFORMS=cpu, or by `stay_on_host`.
"""

from experiments.gpu_compile.compile import (
  Compiled as Compiled,
  check_compiler as check_compiler,
  compile_for as compile_for,
  compile_lowered as compile_lowered,
  compile_memory as compile_memory,
  explain_refusal as explain_refusal,
  find_devices as find_devices,
  find_gpu as find_gpu,
  lower_for as lower_for,
  stay_on_host as stay_on_host,
  trace_for as trace_for,
)
from experiments.gpu_compile.hlo import Kernel as Kernel
from experiments.gpu_compile.ptx import (
  GPUS as GPUS,
  Assembly as Assembly,
  Gpu as Gpu,
)
