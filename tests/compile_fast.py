"""Compile programs of tests by fewer of XLA's passes, where results stay.

Most of XLA's time for a CPU goes into the emitters of fusions and into LLVM's
optimizations. Neither changes which collectives a program has or what it
computes. Two kinds of programs go without both:

* all programs, after `choose(True)`;
* programs of one operation on arrays, of which JAX compiles one for each call
  outside of `jit`: there is nothing to fuse in them.
"""

from collections.abc import Iterator
from typing import Any

import jax
from jax._src import compiler

# Where a JAX has renamed it, tests only take longer.
_NAME = "compile_or_get_cached"
# Statements of a module that compute nothing.
_IDLE = frozenset(
  """
  func.call func.func func.return sdy.mesh stablehlo.broadcast_in_dim
  stablehlo.constant
  """.split()
)

_compile = getattr(compiler, _NAME, None)
# As modules are imported, before the first test.
_chosen = True
# Without the emitters of fusions, and in one module of LLVM: each has a cost of
# its own, and small programs gain nothing from threads.
_OPTIONS: dict[str, bool | int] = {
  "xla_cpu_use_fusion_emitters": False,
  "xla_cpu_parallel_codegen_split_count": 1,
}
_options: dict[str, bool | int] | None = None


def install() -> None:
  """Lets JAX compile through this module from now on."""
  if _compile is not None:
    setattr(compiler, _NAME, _compile_fast)


def choose(fast: bool) -> bool:
  """Compiles every program fast from now on, or only those of one operation.

  Returns:
    Whether this is a change. After one, JAX's caches hold programs of the other
    kind.
  """
  global _chosen
  changed, _chosen = fast != _chosen, fast
  return changed


def _compile_fast(backend: Any, module: Any, devices: Any, options: Any, *rest):
  if not (_chosen or _has_one_operation(module)):
    return _compile(backend, module, devices, options, *rest)
  debug = options.executable_build_options.debug_options
  debug.xla_backend_optimization_level = 0
  debug.xla_llvm_disable_expensive_passes = True
  given = options.env_option_overrides
  options.env_option_overrides = [*given, *_read_options().items()]
  return _compile(backend, module, devices, options, *rest)


def flags() -> str:
  """Returns XLA_FLAGS that do the same for a process of its own.

  JAX_DISABLE_MOST_OPTIMIZATIONS does the rest.
  """
  options = _read_options().items()
  return " ".join(f"--{name}={str(v).lower()}" for name, v in options)


def _read_options() -> dict[str, bool | int]:
  """Returns the options that this version of XLA has."""
  global _options
  if _options is None:
    _options = {}  # While these programs are compiled.
    _options = {name: v for name, v in _OPTIONS.items() if _is_known(name, v)}
  return _options


def _is_known(name: str, value: bool | int) -> bool:
  try:
    jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
  except jax.errors.JaxRuntimeError:
    return False
  return True


def _has_one_operation(module: Any) -> bool:
  found = 0
  for operation in _statements(module.operation, 0):
    found += not _is_idle(operation)
    if found > 1:
      return False
  return True


def _is_idle(operation: Any) -> bool:
  if operation.name == "stablehlo.convert":
    # Of a number that stands beside an array.
    return "x" not in str(operation.results[0].type)
  return operation.name in _IDLE


def _statements(operation: Any, depth: int) -> Iterator[Any]:
  """Yields what a module's functions consist of; loops are one statement."""
  for region in operation.regions:
    for block in region:
      for inner in block:
        yield inner.operation
        if depth == 0:
          yield from _statements(inner.operation, 1)
