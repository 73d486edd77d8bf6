"""The deepest network and the largest batch that fit a device.

What a device must hold is affine in the depth, and nearly so in the batch: two
small programs are compiled, the size at which the device is full is drawn from
them, and the program of that size is compiled to see whether it does fit.
"""

from collections.abc import Callable
from typing import NamedTuple

from experiments.residuals import cases, measure, streamed
from experiments.residuals.points import Spec

# The bottleneck ResNets of the papers have five blocks in the third stage for
# each in the second, and three in the others.
_PER_STEP = 18
_AROUND = 3 * 6 + 2

_Compile = Callable[[int], measure.Memory]


class Fit(NamedTuple):
  """The largest size found to fit.

  Attributes:
    size: depth in layers, or examples.
    memory: of the program of that size, as compiled.
    drawn_bytes: what it was to take by the line through two small ones.
  """

  size: int
  memory: measure.Memory
  drawn_bytes: float


def resnet(steps: int) -> Spec:
  """The ResNet with that many blocks in its second stage, at batch 16.

  >>> resnet(138).options
  {'blocks': (3, 138, 690, 3)}
  """
  return Spec("resnet", 16, {"blocks": (3, steps, 5 * steps, 3)})


def layers(steps: int) -> int:
  """Its depth.

  >>> layers(138)
  2504
  """
  return _PER_STEP * steps + _AROUND


def deepest(
  mode: str,
  target: str,
  limit_bytes: float,
  small: tuple[int, int] = (40, 120),
) -> Fit | None:
  """The deepest bottleneck ResNet of batch 16 and 224 pixels that fits.

  Args:
    mode: of `MODES`, or "streamed".
    target: of `TARGETS`.
    limit_bytes: all that the device holds, arguments and gradients included.
    small: blocks of the second stage of the two that are compiled first.
  """
  compiled = _compiler(resnet, mode, target, limit_bytes)
  found = largest(compiled, limit_bytes, small)
  return found and found._replace(size=layers(found.size))


def largest_batch(
  spec: Spec,
  mode: str,
  target: str,
  limit_bytes: float,
  small: tuple[int, int] = (16, 32),
) -> Fit | None:
  """The largest batch of a network that fits.

  Args:
    spec: the network; its batch is not used.
    mode: of `MODES`, or "streamed".
    target: of `TARGETS`.
    limit_bytes: all that the device holds, arguments and gradients included.
    small: the batches that are compiled first.
  """
  at = lambda batch: spec._replace(batch=batch)
  return largest(_compiler(at, mode, target, limit_bytes), limit_bytes, small)


def largest(
  compiled: _Compile, limit_bytes: float, small: tuple[int, int]
) -> Fit | None:
  """The largest size found to fit, its program compiled.

  The line is drawn through the largest size that fits and the smallest that
  does not, or the next that does, until 99 % of the limit are used. After a
  miss it is followed to a thousandth less: sizes go in steps. After five the
  largest that fits by then is returned, or None.
  """
  known: dict[int, Fit] = {}

  def look(size: int, drawn_bytes: float | None = None) -> None:
    memory = compiled(size)
    drawn_bytes = memory.device_bytes if drawn_bytes is None else drawn_bytes
    known[size] = Fit(size, memory, drawn_bytes)

  def bytes_of(fit: Fit) -> int:
    return fit.memory.device_bytes

  for size in small:
    look(size)
  for _ in range(5):
    fitting = sorted(f for f in known.values() if bytes_of(f) <= limit_bytes)
    missing = sorted(f for f in known.values() if bytes_of(f) > limit_bytes)
    if fitting and bytes_of(fitting[-1]) >= 0.99 * limit_bytes:
      break
    low, other = [*fitting[:-2:-1], *missing, *fitting[-2::-1]][:2]
    slope = (bytes_of(other) - bytes_of(low)) / (other.size - low.size)
    misses = sum(f.size not in small for f in missing)
    aim = limit_bytes * (1 - misses / 1000)
    size = low.size + int((aim - bytes_of(low)) // slope)
    if size < 1 or size in known:
      break
    look(size, bytes_of(low) + slope * (size - low.size))
  fitting = [f for f in known.values() if bytes_of(f) <= limit_bytes]
  return max(fitting, default=None)


def _compiler(
  at: Callable[[int], Spec], mode: str, target: str, limit_bytes: float
) -> _Compile:
  def compiled(size: int) -> measure.Memory:
    spec = at(size)
    if mode == "streamed":
      return streamed.compile_step(
        spec.make(), spec.batch, target, limit_bytes / 2**30
      )
    job = cases.job(mode, spec.make(), spec.batch)
    return measure.compile_step(job, target, limit_bytes / 2**30)

  return compiled
