"""Memory of compiled programs, as the compiler states it."""

from typing import Any, NamedTuple


class ProgramMemory(NamedTuple):
  """Counts the bytes of a compiled program's buffers.

  Attributes:
    argument_bytes: arguments, on the device.
    output_bytes: results, on the device.
    alias_bytes: results that take the place of donated arguments; both
      `argument_bytes` and `output_bytes` count them.
    temp_bytes: everything in between, on the device.
    host_temp_bytes: everything in between, in the host's memory.
  """

  argument_bytes: int
  output_bytes: int
  alias_bytes: int
  temp_bytes: int
  host_temp_bytes: int

  @property
  def device_bytes(self) -> int:
    """Bytes on the device while the program runs."""
    held = self.argument_bytes + self.output_bytes + self.temp_bytes
    return held - self.alias_bytes


def program_memory(compiled: Any) -> ProgramMemory:
  """Reads the memory that a compiled program takes."""
  # compiled: `jax.jit(fn).lower(*args).compile()`, of any backend.
  stated = compiled.memory_analysis()
  return ProgramMemory(
    int(stated.argument_size_in_bytes),
    int(stated.output_size_in_bytes),
    int(stated.alias_size_in_bytes),
    int(stated.temp_size_in_bytes),
    int(stated.host_temp_size_in_bytes),
  )
