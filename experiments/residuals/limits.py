"""Searches what fits a device: depth, batch, and plans within budgets.

Device memory is affine in the depth, and nearly affine in the batch. Two small
programs are compiled first. The line through them says at which size the device
is full, and the program of that size is compiled to see whether it fits.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from experiments import models
from experiments.residuals import cases, measure, networks, streamed
from jaxmotion import memory, perfmodel, planner


class HasBytes(Protocol):
  """Describes the memory of a program on a device."""

  @property
  def device_bytes(self) -> int:
    """All bytes that the device must hold."""


_CompileSize = Callable[[int], HasBytes]


class FittingSize(NamedTuple):
  """The largest size found to fit a device."""

  size: int  # Depth in layers, or number of examples.
  memory: Any  # Memory of the program of that size: a `HasBytes`.
  # Device memory that the line through two other sizes predicted.
  drawn_bytes: float


def resnet_spec(blocks: int) -> networks.NetworkSpec:
  """Returns the ResNet with that many blocks in its second stage, at batch 16.

  The bottleneck ResNets of the papers have five blocks in the third stage for
  each block in the second, and three blocks in the others.

  >>> resnet_spec(138).options
  {'blocks': (3, 138, 690, 3)}
  """
  return networks.NetworkSpec(
    "resnet", 16, {"blocks": (3, blocks, 5 * blocks, 3)}
  )


def find_deepest(
  mode: str,
  target: str,
  limit_bytes: float,
  first_sizes: tuple[int, int] = (40, 120),
) -> FittingSize | None:
  """Finds the deepest ResNet of batch 16 and 224 pixels that fits."""
  compile_size = _make_compiler(resnet_spec, mode, target, limit_bytes)
  found = search_largest(compile_size, limit_bytes, first_sizes)
  if found is None:
    return None
  blocks = resnet_spec(found.size).options["blocks"]
  return found._replace(size=models.count_layers(blocks))


def find_largest_batch(
  spec: networks.NetworkSpec,
  mode: str,
  target: str,
  limit_bytes: float,
  first_sizes: tuple[int, int] = (16, 32),
) -> FittingSize | None:
  """Finds the largest batch of a network that fits."""
  at_batch = lambda batch: spec._replace(batch=batch)
  compile_size = _make_compiler(at_batch, mode, target, limit_bytes)
  return search_largest(compile_size, limit_bytes, first_sizes)


def search_largest(
  compile_size: _CompileSize,
  limit_bytes: float,
  first_sizes: tuple[int, int],
  miss_share: float = 0.001,
) -> FittingSize | None:
  """Searches the largest size that fits by compiling a few programs."""
  # Each of up to five more sizes is read off a line: through the largest size
  # that fits and the smallest that does not, or the next one that fits. The
  # search ends at 99 % of the limit. After each miss it aims a share of the
  # limit lower, because memory grows in pages and segments.
  known: dict[int, FittingSize] = {}

  def try_size(size: int, drawn_bytes: float | None = None) -> None:
    memory = compile_size(size)
    drawn_bytes = memory.device_bytes if drawn_bytes is None else drawn_bytes
    known[size] = FittingSize(size, memory, drawn_bytes)

  def bytes_of(tried: FittingSize) -> int:
    return tried.memory.device_bytes

  for size in first_sizes:
    try_size(size)
  for _ in range(5):
    fitting = sorted(f for f in known.values() if bytes_of(f) <= limit_bytes)
    missing = sorted(f for f in known.values() if bytes_of(f) > limit_bytes)
    if fitting and bytes_of(fitting[-1]) >= 0.99 * limit_bytes:
      break
    low, other = [*fitting[:-2:-1], *missing, *fitting[-2::-1]][:2]
    slope = (bytes_of(other) - bytes_of(low)) / (other.size - low.size)
    misses = sum(f.size not in first_sizes for f in missing)
    aim_bytes = limit_bytes * (1 - misses * miss_share)
    # Small steps may be measured to take as much as larger ones.
    more = (aim_bytes - bytes_of(low)) // slope if slope > 0 else low.size
    size = low.size + int(more)
    if size < 1 or size in known:
      break
    try_size(size, bytes_of(low) + slope * (size - low.size))
  fitting = [f for f in known.values() if bytes_of(f) <= limit_bytes]
  return max(fitting, default=None)


def _make_compiler(
  at_size: Callable[[int], networks.NetworkSpec],
  mode: str,
  target: str,
  limit_bytes: float,
) -> _CompileSize:
  """Returns a function that compiles the network of a size in a mode."""

  def compile_size(size: int) -> measure.StepMemory:
    """Returns the memory of a step at one depth or batch."""
    spec = at_size(size)
    net = spec.make_network()
    memory_gib = limit_bytes / 2**30
    if mode == "streamed":
      return streamed.compile_step(net, spec.batch, target, memory_gib)
    step = cases.build_step(mode, net, spec.batch)
    return measure.compile_step(step, target, memory_gib)

  return compile_size


_OPTIONS = (
  cases.INT8,
  memory.offload(),
  memory.offload(cases.INT8),
  memory.recompute(),
)


class BudgetPlan(NamedTuple):
  """A memory budget of a network, and its plan beside plain training."""

  spec: networks.NetworkSpec  # The network and its batch.
  share: float  # Budget relative to the device memory of plain training.
  budget_bytes: float  # The budget.
  plain_memory: measure.StepMemory  # Memory of plain training.
  plain_s: float  # Predicted seconds of a plain step.
  # The fastest plan within the budget; None if no plan fits.
  plan: planner.MemoryPlan | None
  # Smallest budget that a plan fits; None with `plan`.
  least_bytes: float | None


def fit_budgets(
  spec: networks.NetworkSpec, shares: Sequence[float], target: str
) -> Iterator[BudgetPlan]:
  """Yields the plan of a network for each memory budget."""
  # A residual may be kept, rounded to 8 bits, offloaded to the host exactly or
  # rounded, or recomputed. The planner sees the whole loss as one function.
  net = spec.make_network()
  plain = cases.build_step("plain", net, spec.batch)
  plain_memory = measure.compile_step(plain, target)
  plain_s = measure.predict_figures(plain, 0, target).step_s

  def measure_memory(fn: Any, *args: Any) -> int:
    step = cases.StepProgram(fn, args)
    return measure.compile_step(step, target).device_bytes

  for share in shares:
    budget = share * plain_memory.device_bytes
    plan, least_bytes = None, None
    try:
      plan = planner.fit_memory(
        lambda p, *b: net.loss(p, b),
        net.params,
        net.batch(spec.batch),
        perfmodel.builtin_platform(measure.TARGETS[target]),
        budget,
        options=_OPTIONS,
        measure_memory=measure_memory,
      )
    except planner.BudgetTooSmallError as error:
      least_bytes = error.least_bytes
    yield BudgetPlan(
      spec, share, budget, plain_memory, plain_s, plan, least_bytes
    )
