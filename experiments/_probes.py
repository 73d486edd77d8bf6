"""Operations of known size, timed on all devices at once."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.progress
from jax.sharding import PartitionSpec as P

from jaxmotion import codecs, make_key, perfmodel
from jaxmotion.perfmodel import Curve

CODECS = {
  "bf16": codecs.cast("bfloat16"),
  "int8": codecs.uniform(bits=8),
  "int4": codecs.uniform(bits=4),
  "sign": codecs.sign(),
  "topk1": codecs.topk(density=0.01),
}
COLLECTIVES: dict[str, Callable[[jax.Array], jax.Array]] = {
  "all_reduce": lambda x: jax.lax.psum(x, "axis"),
  "reduce_scatter": lambda x: jax.lax.psum_scatter(x, "axis", tiled=True),
  "all_gather": lambda x: jax.lax.all_gather(
    x, "axis", tiled=True, to="invarying"
  ),
  "all_to_all": lambda x: jax.lax.all_to_all(x, "axis", 0, 0, tiled=True),
}
_COLUMNS = 256
_CHANNELS = 32
_SMALLEST = 1 << 12
_DEGREE = 64
_LEAST_S = 1e-7


class Probe(NamedTuple):
  """An operation at one size.

  Attributes:
    curve: that it is a point of.
    size: in the unit of the curve.
    run: executes it once.
  """

  curve: str
  size: float
  run: Callable[[], Any]


def make_mesh(workers: int) -> jax.sharding.Mesh:
  """The devices that work at once.

  Raises:
    ValueError: there are not so many.
  """
  devices = jax.devices()
  if workers > len(devices):
    raise ValueError(
      f"`workers` must be at most {len(devices)}, the devices there are, got "
      f"{workers}."
    )
  return jax.sharding.Mesh(np.array(devices[:workers]), ("axis",))


def compute(mesh: jax.sharding.Mesh, largest: int, count: int) -> list[Probe]:
  """Products, convolutions, passes and reductions of float32, and copies."""
  kernel = _floats(3, 3, _CHANNELS, _CHANNELS)
  probes = []
  for side in _spaced(32, (largest / 4) ** 0.5, count):
    probes.append(_probe(mesh, lambda x: x @ x, _floats(side, side)))
  for side in _spaced(4, (largest / (8 * _CHANNELS)) ** 0.5, count):
    images = _floats(4, side, side, _CHANNELS)
    probes.append(_probe(mesh, _convolve, images, kernel))
  for rows in _spaced(_SMALLEST / _COLUMNS, largest / _COLUMNS, count):
    x = _floats(rows, _COLUMNS)
    probes.append(_probe(mesh, lambda x: 2 * x + 1, x))
    probes.append(_probe(mesh, lambda x: x.sum(-1), x))
    host = np.asarray(x)
    probes.append(Probe("copy", host.nbytes, _copy(mesh, host)))
  for size in _spaced(_SMALLEST, largest / 16, count):
    x = _floats(size) / 4
    flops = perfmodel.cost(_polynomial, x).flops
    probes.append(Probe("vector", flops, _everywhere(mesh, _polynomial, x)))
  return probes


def coding(
  mesh: jax.sharding.Mesh, name: str, largest: int, count: int
) -> list[Probe]:
  """Encoding, decoding, and decoding and adding two payloads.

  Raises:
    ValueError: no codec of that name.
  """
  if name not in CODECS:
    raise ValueError(f"`codecs` must be some of {list(CODECS)}, got {name!r}.")
  codec = CODECS[name]
  probes = []
  for rows in _spaced(_SMALLEST / _COLUMNS, largest / _COLUMNS, count):
    x = _floats(rows, _COLUMNS)

    def encode(x: jax.Array) -> Any:
      return codec.encode(x, codec.init(x), make_key(0))[0]

    def decode(payloads: Any, like: jax.Array = x) -> jax.Array:
      return jax.vmap(lambda p: codec.decode(p, like))(payloads).sum(0)

    payload = jax.jit(encode)(x)
    probes.append(
      Probe(f"encode {codec!r}", x.size, _everywhere(mesh, encode, x))
    )
    for n, what in ((1, "decode"), (2, "two")):
      several = jax.tree.map(lambda a, n=n: jnp.stack([a] * n), payload)
      run = _everywhere(mesh, decode, several)
      probes.append(Probe(f"{what} {codec!r}", x.size, run))
  return probes


def collectives(
  mesh: jax.sharding.Mesh, largest: int, count: int
) -> list[Probe]:
  """Collectives of float32, by payload bytes."""
  workers = mesh.size
  sharding = jax.sharding.NamedSharding(mesh, P("axis"))
  probes = []
  for rows in _spaced(_SMALLEST / _COLUMNS, largest / _COLUMNS, count):
    own = -(-rows * _COLUMNS // workers) * workers
    x = jax.device_put(np.ones(own * workers, np.float32), sharding)
    for op, body in COLLECTIVES.items():
      whole = op in ("all_reduce", "all_gather")
      program = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=P("axis"),
        out_specs=P() if whole else P("axis"),
      )
      probes.append(Probe(f"{op} {workers}", 4 * own, _compiled(program, x)))
  return probes


def measure(
  mesh: jax.sharding.Mesh, probes: Sequence[Probe], repeats: int
) -> tuple[float, dict[str, Curve]]:
  """Times all probes in turns.

  Args:
    mesh: the devices that work at once.
    probes: what to time.
    repeats: of each; one more comes first and is not counted.

  Returns:
    Seconds of calling an empty program, and the curves without them. Sizes
    that cannot be told from an empty program are not on their curve, but for
    the largest.
  """
  empty = _everywhere(mesh, lambda x: x + 1, _floats(1))
  every = [empty, *(probe.run for probe in probes)]
  times = np.empty((repeats + 1, len(every)))
  for row in rich.progress.track(times, "calibrating"):
    for i, run in enumerate(every):
      begin = time.perf_counter()
      run()
      row[i] = time.perf_counter() - begin
  times = times[1:]
  call_s, call_noise_s = _middle(times[:, 0])
  points: dict[str, list[Point]] = {}
  for probe, column in zip(probes, times.T[1:], strict=True):
    middle, spread = _middle(column)
    point = Point(probe.size, middle - call_s, spread / middle)
    points.setdefault(probe.curve, []).append(point)
  curves = {k: make_curve(v, call_noise_s) for k, v in points.items()}
  return call_s, _with_additions(curves)


class Point(NamedTuple):
  """A size and what it takes, with its noise relative to that."""

  size: float
  seconds: float
  noise: float


def _middle(times: np.ndarray) -> tuple[float, float]:
  """The median, and half of the spread around it."""
  low, middle, high = np.percentile(times, (10, 50, 90))
  return float(middle), float(high - low) / 2


def make_curve(points: list[Point], least_s: float) -> Curve:
  """The curve through points, without those that are lost in the noise.

  Args:
    points: in any order; the largest is kept whatever it takes.
    least_s: seconds of noise; others that take no more are left out.
  """
  *smaller, largest = sorted(points)
  kept = [point for point in smaller if point.seconds > least_s]
  sizes, seconds, noise = zip(*kept, largest, strict=True)
  rising = np.maximum.accumulate(np.maximum(seconds, _LEAST_S))
  return Curve(
    sizes=tuple(map(float, sizes)),
    seconds=tuple(map(float, rising)),
    noise=statistics.median(noise),
  )


def _with_additions(curves: dict[str, Curve]) -> dict[str, Curve]:
  """What one more payload takes: two of them, less one."""
  found = {}
  for name, curve in curves.items():
    what, _, codec = name.partition(" ")
    if what == "two":
      one = curves[f"decode {codec}"]
      points = [
        Point(size, two - one.at(size), curve.noise)
        for size, two in zip(curve.sizes, curve.seconds, strict=True)
      ]
      found[f"add {codec}"] = make_curve(points, 0.0)
    else:
      found[name] = curve
  return found


def _probe(
  mesh: jax.sharding.Mesh, fn: Callable[..., Any], *args: Any
) -> Probe:
  """A function of one kernel, at the size that the model gives it."""
  (kernel,) = perfmodel.cost(fn, *args).kernels
  name, size = perfmodel.curve_of(kernel)
  return Probe(name, size, _everywhere(mesh, fn, *args))


def _everywhere(
  mesh: jax.sharding.Mesh, fn: Callable[..., Any], *args: Any
) -> Callable[[], Any]:
  """Runs a function on every device, each with arguments of its own."""

  def local(args: Any) -> Any:
    out = fn(*jax.tree.map(lambda a: a[0], args))
    return jax.tree.map(lambda a: a[None], out)

  program = jax.shard_map(
    local, mesh=mesh, in_specs=P("axis"), out_specs=P("axis")
  )
  sharding = jax.sharding.NamedSharding(mesh, P("axis"))
  every = jax.tree.map(
    lambda a: jax.device_put(np.stack([a] * mesh.size), sharding), args
  )
  return _compiled(program, every)


def _compiled(fn: Callable[..., Any], arg: Any) -> Callable[[], Any]:
  compiled = jax.jit(fn).lower(arg).compile()
  return lambda: jax.block_until_ready(compiled(arg))


def _copy(mesh: jax.sharding.Mesh, host: np.ndarray) -> Callable[[], Any]:
  devices = list(mesh.devices.flat)
  return lambda: jax.block_until_ready(
    [jax.device_put(host, device, may_alias=False) for device in devices]
  )


def _convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
  numbers = ("NHWC", "HWIO", "NHWC")
  return jax.lax.conv_general_dilated(
    x, kernel, (1, 1), "SAME", dimension_numbers=numbers
  )


def _polynomial(x: jax.Array) -> jax.Array:
  y = x
  for _ in range(_DEGREE):
    y = y * x + 0.5
  return y


def _floats(*shape: int) -> jax.Array:
  rng = np.random.default_rng(0)
  return jnp.asarray(rng.standard_normal(shape, dtype=np.float32))


def _spaced(low: float, high: float, count: int) -> list[int]:
  """Whole numbers equally far apart in their logarithms, none twice."""
  return sorted({round(step) for step in np.geomspace(low, high, count)})
