"""GPUs that programs are compiled for, and their description for XLA.

References: NVIDIA H100 and H200 datasheets (memory, bandwidth); NVIDIA H100
Tensor Core GPU Architecture (multiprocessors, L2); CUDA C++ Programming Guide,
technical specifications of compute capability 9.0 (limits).
"""

from typing import NamedTuple


class Gpu(NamedTuple):
  """A GPU of compute capability 9.0: name, memory and bandwidth.

  Attributes:
    kind: name of the device.
    memory_gib: memory of the device, GiB.
    bandwidth: bandwidth of that memory, bytes per second.
  """

  kind: str
  memory_gib: float
  bandwidth: int


GPUS = {
  "H100": Gpu("NVIDIA H100 80GB HBM3", 80, 3_350_000_000_000),
  "H200": Gpu("NVIDIA H200", 141, 4_800_000_000_000),
}

# Limits of a multiprocessor ("core") of compute capability 9.0.
THREADS_PER_CORE = 2048
BLOCKS_PER_CORE = 32
REGISTERS_PER_CORE = 65536
SHARED_BYTES_PER_CORE = 233472
# Shared memory that the system takes for each block.
SHARED_BYTES_RESERVED = 1024


def describe_target(gpu: Gpu) -> str:
  """Returns the text of a `GpuTargetConfigProto` of a GPU."""
  return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {SHARED_BYTES_PER_CORE}
  threads_per_core_limit: {THREADS_PER_CORE}
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: {int(gpu.memory_gib * 2**30)}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: {REGISTERS_PER_CORE}
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{gpu.kind}"
"""
