"""Makes and times probes: operations of known size, on all devices at once."""

import functools
import math
import operator
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

from jaxmotion import codecs, core, perfmodel
from jaxmotion.collectives.extend import gather_payloads
from jaxmotion.perfmodel.extend import kernel_curve


def _gather_and_add(x: jax.Array) -> jax.Array:
  """Gathers as `exchange` does (a sum of words between hosts), then adds up."""
  words = jax.lax.bitcast_convert_type(x, jnp.uint32)
  (rows,) = gather_payloads([words], "axis")
  return functools.reduce(operator.add, list(rows))


COLLECTIVES: dict[str, Callable[[jax.Array], jax.Array]] = {
  "all_reduce": lambda x: jax.lax.psum(x, "axis"),
  "reduce_scatter": lambda x: jax.lax.psum_scatter(x, "axis", tiled=True),
  "all_gather": _gather_and_add,
  "all_to_all": lambda x: jax.lax.all_to_all(x, "axis", 0, 0, tiled=True),
}
_AXIS = P("axis")
_COLUMNS = 256  # Of the matrices that are passed over.
_CHANNELS = 32  # Of the images and kernels of convolutions.
_SMALLEST = 1 << 12  # Elements of the smallest array.
_DEGREE = 64  # Of the polynomial by which FLOPs without a matmul are timed.
_LEAST_S = 1e-7  # Curves must be positive.
# First words of the names of whole updates.
_UPDATES = ("update", "one", "two")


class Probe(NamedTuple):
  """One operation at one size."""

  # Name of the curve that the probe is a point of.
  curve: str
  # In the unit of the curve.
  size: float
  # Runs the operation once and waits for it.
  run: Callable[[], Any]


def make_mesh(workers: int) -> jax.sharding.Mesh:
  """Returns a mesh of the devices that work at once, with one axis, `axis`."""
  devices = jax.devices()
  if workers > len(devices):
    raise ValueError(
      f"`workers` must be at most {len(devices)}, the number of devices, got "
      f"{workers}."
    )
  return jax.sharding.Mesh(np.array(devices[:workers]), ("axis",))


def compute_probes(
  mesh: jax.sharding.Mesh, largest: int, count: int
) -> Iterator[Probe]:
  """Yields float32 matmuls, convolutions, passes, reductions, and copies."""
  kernel = random_floats(3, 3, _CHANNELS, _CHANNELS)
  for side in _spaced_sizes(32, (largest / 4) ** 0.5, count):
    yield _kernel_probe(mesh, lambda x: x @ x, random_floats(side, side))
  for side in _spaced_sizes(4, (largest / (8 * _CHANNELS)) ** 0.5, count):
    images = random_floats(4, side, side, _CHANNELS)
    yield _kernel_probe(mesh, _run_convolution, images, kernel)
  for rows in _row_counts(largest, count):
    x = random_floats(rows, _COLUMNS)
    yield _kernel_probe(mesh, lambda x: 2 * x + 1, x)
    yield _kernel_probe(mesh, lambda x: x.sum(-1), x)
    # A copy: an array that JAX owns would not be transferred.
    host = np.array(x)
    yield Probe("copy", host.nbytes, _copy_call(mesh, host))
  for size in _spaced_sizes(_SMALLEST, largest / 16, count):
    x = random_floats(size) / 4
    flops = perfmodel.predict_cost(_run_polynomial, x).flops
    yield Probe("vector", flops, compile_everywhere(mesh, _run_polynomial, x))


def codec_probes(
  mesh: jax.sharding.Mesh, codec: codecs.Codec, largest: int, count: int
) -> Iterator[Probe]:
  """Yields encoding, and parameter updates by one payload and by two."""
  # Codec state and parameters are updated in place, as in a step.
  for rows in _row_counts(largest, count):
    x = random_floats(rows, _COLUMNS)

    def encode(state: Any, x: jax.Array) -> Any:
      payload, state = codec.encode(x, state, core.make_key(0))
      return state, payload

    def update(params: jax.Array, *payloads: Any) -> Any:
      # Payloads arrive one by one: an array that is already stacked would be
      # read 3x slower.
      rows = jax.tree.map(lambda *leaves: jnp.stack(leaves), *payloads)
      return params - 0.1 * codec.sum_decoded(rows, params), ()

    state, payload = jax.jit(encode)(codec.init(x), x)
    run = _compile_in_place(mesh, encode, state, x)
    yield Probe(f"encode {codec!r}", x.size, run)
    for n, what in ((1, "one"), (2, "two")):
      run = _compile_in_place(mesh, update, x, *[payload] * n)
      yield Probe(f"{what} {codec!r}", x.size, run)


def update_probes(
  mesh: jax.sharding.Mesh, largest: int, count: int
) -> Iterator[Probe]:
  """Yields in-place parameter updates by uncompressed gradients."""
  for rows in _row_counts(largest, count):
    x = random_floats(rows, _COLUMNS)
    run = _compile_in_place(mesh, lambda p, g: (p - 0.1 * g, ()), x, x)
    yield Probe("update", x.size, run)


def collective_probes(
  mesh: jax.sharding.Mesh, largest: int, count: int
) -> Iterator[Probe]:
  """Yields collectives of float32 arrays, by payload bytes."""
  workers = mesh.shape["axis"]
  for rows in _row_counts(largest, count):
    x = _put_ones(mesh, rows)
    for op, body in COLLECTIVES.items():
      out = P() if op in ("all_reduce", "all_gather") else _AXIS
      program = jax.shard_map(body, mesh=mesh, in_specs=_AXIS, out_specs=out)
      run = _compile_call(program, x)
      yield Probe(f"{op} {workers}", x.nbytes / workers, run)


def pair_probes(mesh: jax.sharding.Mesh, largest: int) -> Iterator[Probe]:
  """Yields transfers of worker 0 to each other one, back, and both at once."""
  workers = mesh.shape["axis"]
  x = _put_ones(mesh, _row_counts(largest, 2)[-1])
  for other in range(1, workers):
    out, back = (0, other), (other, 0)
    for moves in ((out,), (back,), (out, back)):
      body = functools.partial(jax.lax.ppermute, axis_name="axis", perm=moves)
      name = " and ".join(f"{source} to {target}" for source, target in moves)
      program = jax.shard_map(body, mesh=mesh, in_specs=_AXIS, out_specs=_AXIS)
      yield Probe(name, x.nbytes / workers, _compile_call(program, x))


def _put_ones(mesh: jax.sharding.Mesh, rows: int) -> jax.Array:
  """Returns float32 ones, of which each worker has at least that many rows."""
  workers = mesh.shape["axis"]
  own = -(-rows * _COLUMNS // workers) * workers
  # A view of one number: no process holds what the others have.
  ones = np.broadcast_to(np.float32(1), own * workers)
  return _put_shards(ones, jax.sharding.NamedSharding(mesh, _AXIS))


def _kernel_probe(
  mesh: jax.sharding.Mesh, fn: Callable[..., Any], *args: Any
) -> Probe:
  """Returns a function of one kernel, at the size in the cost model's unit."""
  (kernel,) = perfmodel.predict_cost(fn, *args).kernels
  name, size = kernel_curve(kernel)
  return Probe(name, size, compile_everywhere(mesh, fn, *args))


def compile_everywhere(
  mesh: jax.sharding.Mesh, fn: Callable[..., Any], *args: Any
) -> Callable[[], Any]:
  """Compiles a function to run on every device, each with its own arguments."""
  program = _map_devices(mesh, lambda args: fn(*args))
  return _compile_call(program, _copy_to_devices(mesh, args))


def _compile_in_place(
  mesh: jax.sharding.Mesh, fn: Callable[..., Any], carry: Any, *args: Any
) -> Callable[[], Any]:
  """Compiles `fn(carry, *args) -> carry, out` for every device, in place."""
  program = _map_devices(mesh, lambda both: fn(both[0], *both[1]))
  carry, args = _copy_to_devices(mesh, carry), _copy_to_devices(mesh, args)
  jitted = jax.jit(lambda carry, args: program((carry, args)), donate_argnums=0)
  compiled = jitted.lower(carry, args).compile()

  def run() -> None:
    """Runs once, on what the last run left: its own carry is donated."""
    nonlocal carry
    carry, out = compiled(carry, args)
    jax.block_until_ready((carry, out))

  return run


def _map_devices(
  mesh: jax.sharding.Mesh, fn: Callable[[Any], Any]
) -> Callable[..., Any]:
  """Maps a function over the leading axis, one row for each device."""

  def local(args: Any) -> Any:
    out = fn(jax.tree.map(lambda a: a[0], args))
    return jax.tree.map(lambda a: a[None], out)

  return jax.shard_map(
    local, mesh=mesh, in_specs=P("axis"), out_specs=P("axis")
  )


def _copy_to_devices(mesh: jax.sharding.Mesh, tree: Any) -> Any:
  """Returns arrays with a leading axis of devices, each with its own copy."""
  sharding = jax.sharding.NamedSharding(mesh, P("axis"))
  return jax.tree.map(
    lambda a: _put_shards(np.stack([np.asarray(a)] * mesh.size), sharding), tree
  )


def _put_shards(x: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
  """Returns a sharded array, of which this process has its devices' part."""
  return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i].copy())


def _compile_call(fn: Callable[..., Any], arg: Any) -> Callable[[], Any]:
  """Compiles a call that waits for its result."""
  compiled = jax.jit(fn).lower(arg).compile()
  return lambda: jax.block_until_ready(compiled(arg))


def _copy_call(mesh: jax.sharding.Mesh, host: np.ndarray) -> Callable[[], Any]:
  """Returns a call that copies an array of the host to all devices."""
  devices = [d for d in mesh.devices.flat if d in jax.local_devices()]
  return lambda: jax.block_until_ready(
    [jax.device_put(host, device, may_alias=False) for device in devices]
  )


def _run_convolution(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Runs a convolution of images as networks have them."""
  numbers = ("NHWC", "HWIO", "NHWC")
  return jax.lax.conv_general_dilated(
    x, kernel, (1, 1), "SAME", dimension_numbers=numbers
  )


def _run_polynomial(x: jax.Array) -> jax.Array:
  """Multiplies and adds so often that memory takes no time beside it."""
  y = x
  for _ in range(_DEGREE):
    y = y * x + 0.5
  return y


def random_floats(*shape: int) -> jax.Array:
  """Returns normal float32 numbers, the same at every call."""
  rng = np.random.default_rng(0)
  return jnp.asarray(rng.standard_normal(shape, dtype=np.float32))


def _spaced_sizes(low: float, high: float, count: int) -> list[int]:
  """Returns distinct whole numbers, equally far apart in their logarithms."""
  return sorted({round(step) for step in np.geomspace(low, high, count)})


def _row_counts(largest: int, count: int) -> list[int]:
  """Returns powers of two, the sizes that most parameters have."""
  # Other sizes can take three times as long.
  spaced = _spaced_sizes(_SMALLEST / _COLUMNS, largest / _COLUMNS, count)
  return sorted({2 ** round(math.log2(rows)) for rows in spaced})


class ProbeTimer:
  """Times all probes once per round, so that slow minutes fall on all alike."""

  def __init__(
    self,
    mesh: jax.sharding.Mesh,
    probes: Sequence[Probe],
    barrier: Callable[[], object] = lambda: None,
  ):
    self._probes, self._barrier = probes, barrier
    self._empty = compile_everywhere(mesh, lambda x: x + 1, random_floats(1))
    self._times: list[list[float]] = []
    self._time_all()

  def run_round(self) -> None:
    """Times every probe once; the round at construction is not counted."""
    self._times.append(self._time_all())

  def _time_all(self) -> list[float]:
    """Runs the empty program and each probe once; returns their seconds."""
    seconds = []
    for run in (self._empty, *(probe.run for probe in self._probes)):
      self._barrier()
      begin = time.perf_counter()
      run()
      seconds.append(time.perf_counter() - begin)
    return seconds

  def take_slowest(self) -> None:
    """Replaces the seconds of this process by the greatest of all processes."""
    # A process that only sends is done before the others have received.
    times = multihost_utils.process_allgather(np.array(self._times))
    self._times = times.max(0).tolist()

  def make_curves(self) -> tuple[float, dict[str, perfmodel.Curve]]:
    """Returns the seconds of calling an empty program, and all curves."""
    # The time of an empty program is subtracted from every size. Sizes whose
    # remainder lies within the noise are left out, except for the largest.
    times = np.array(self._times)
    call_s, call_noise_s = robust_seconds(times[:, 0])
    points: dict[str, list[Point]] = {}
    for probe, column in zip(self._probes, times.T[1:], strict=True):
      second, spread = robust_seconds(column)
      point = Point(probe.size, second - call_s, spread / second)
      points.setdefault(probe.curve, []).append(point)
    curves = {k: make_curve(v, call_noise_s) for k, v in points.items()}
    return call_s, subtract_updates(curves, call_noise_s)


class Point(NamedTuple):
  """Size, seconds and relative noise of one probe."""

  size: float
  seconds: float
  noise: float


def robust_seconds(times: np.ndarray) -> tuple[float, float]:
  """Returns an operation's seconds, and half their 10 to 90 % spread."""
  # Other processes only add to a time, so the lower quartile is taken. On an
  # idle machine the lower quartile is the median up to the noise.
  low, second, high = np.percentile(times, (10, 25, 90))
  return float(second), float(high - low) / 2


def make_curve(points: list[Point], least_s: float) -> perfmodel.Curve:
  """Returns the curve through points, without points within the noise."""
  # `least_s`: seconds of noise; smaller sizes that take no more are left out.
  *smaller, largest = sorted(points)
  clear = [point for point in smaller if point.seconds > least_s]
  sizes, seconds, noise = zip(*clear, largest, strict=True)
  return perfmodel.Curve(
    sizes=tuple(map(float, sizes)),
    seconds=tuple(_pool_violators(np.maximum(seconds, _LEAST_S))),
    noise=statistics.median(noise),
  )


def _pool_violators(seconds: Iterable[float]) -> list[float]:
  """Returns the nearest non-decreasing sequence (pool adjacent violators)."""
  pools: list[tuple[float, int]] = []
  for second in seconds:
    mean, count = float(second), 1
    while pools and pools[-1][0] > mean:
      before, more = pools.pop()
      mean = (before * more + mean * count) / (more + count)
      count += more
    pools.append((mean, count))
  return [mean for mean, count in pools for _ in range(count)]


def subtract_updates(
  curves: dict[str, perfmodel.Curve], least_s: float
) -> dict[str, perfmodel.Curve]:
  """Replaces curves of whole updates by those of decoding and of adding."""
  # Decoding is an update by one payload less a plain update. Adding is an
  # update by two payloads less that by one.
  # `least_s`: seconds of noise.
  parts = {k: c for k, c in curves.items() if k.split()[0] not in _UPDATES}
  for name, one in curves.items():
    what, _, codec = name.partition(" ")
    if what == "one":
      two = curves[f"two {codec}"]
      parts[f"decode {codec}"] = _subtract_curve(one, curves["update"], least_s)
      parts[f"add {codec}"] = _subtract_curve(two, one, least_s)
  return parts


def _subtract_curve(
  whole: perfmodel.Curve, part: perfmodel.Curve, least_s: float
) -> perfmodel.Curve:
  """Returns the seconds that a whole takes more than its part."""
  points = [
    Point(size, seconds - part.seconds_at(size), whole.noise)
    for size, seconds in zip(whole.sizes, whole.seconds, strict=True)
  ]
  return make_curve(points, least_s)
