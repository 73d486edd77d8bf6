"""Operations of known size, timed on all devices at once."""

import functools
import math
import operator
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxmotion import codecs, make_key, perfmodel
from jaxmotion.collectives.extend import gather_payloads
from jaxmotion.perfmodel import Curve
from jaxmotion.perfmodel.extend import kernel_curve

CODECS = {
  "bf16": codecs.cast("bfloat16"),
  "int8": codecs.uniform(bits=8),
  "int4": codecs.uniform(bits=4),
  "sign": codecs.sign(),
  "topk1": codecs.topk(density=0.01),
  "int4_feedback": codecs.feedback(codecs.uniform(bits=4)),
  "sign_feedback": codecs.feedback(codecs.sign()),
  "topk1_feedback": codecs.feedback(codecs.topk(density=0.01)),
}


def _gather(x: jax.Array) -> jax.Array:
  """As exchanges gather, which is a sum where that is faster, and added up."""
  words = jax.lax.bitcast_convert_type(x, jnp.uint32)
  (rows,) = gather_payloads([words], "axis")
  return functools.reduce(operator.add, list(rows))


COLLECTIVES: dict[str, Callable[[jax.Array], jax.Array]] = {
  "all_reduce": lambda x: jax.lax.psum(x, "axis"),
  "reduce_scatter": lambda x: jax.lax.psum_scatter(x, "axis", tiled=True),
  "all_gather": _gather,
  "all_to_all": lambda x: jax.lax.all_to_all(x, "axis", 0, 0, tiled=True),
}
_COLUMNS = 256
_CHANNELS = 32
_SMALLEST = 1 << 12
_DEGREE = 64
_LEAST_S = 1e-7
_UPDATES = ("update", "one", "two")


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
  for rows in _rows(largest, count):
    x = _floats(rows, _COLUMNS)
    probes.append(_probe(mesh, lambda x: 2 * x + 1, x))
    probes.append(_probe(mesh, lambda x: x.sum(-1), x))
    host = np.array(x)  # Of its own: what JAX made is not copied.
    probes.append(Probe("copy", host.nbytes, _copy(mesh, host)))
  for size in _spaced(_SMALLEST, largest / 16, count):
    x = _floats(size) / 4
    flops = perfmodel.predict_cost(_polynomial, x).flops
    probes.append(Probe("vector", flops, _everywhere(mesh, _polynomial, x)))
  return probes


def coding(
  mesh: jax.sharding.Mesh, name: str, largest: int, count: int
) -> list[Probe]:
  """Encoding, and updates of parameters by one payload and by two.

  Memory of the codec and parameters are written in place, as in a step.

  Raises:
    ValueError: no codec of that name.
  """
  if name not in CODECS:
    raise ValueError(f"`codecs` must be some of {list(CODECS)}, got {name!r}.")
  codec = CODECS[name]
  probes = []
  for rows in _rows(largest, count):
    x = _floats(rows, _COLUMNS)

    def encode(state: Any, x: jax.Array) -> Any:
      payload, state = codec.encode(x, state, make_key(0))
      return state, payload

    def update(params: jax.Array, *payloads: Any) -> Any:
      # As they arrive: an array that is stacked already is read 3x slower.
      rows = jax.tree.map(lambda *leaves: jnp.stack(leaves), *payloads)
      return params - 0.1 * codec.sum_decoded(rows, params), ()

    state, payload = jax.jit(encode)(codec.init(x), x)
    run = _in_place(mesh, encode, state, x)
    probes.append(Probe(f"encode {codec!r}", x.size, run))
    for n, what in ((1, "one"), (2, "two")):
      run = _in_place(mesh, update, x, *[payload] * n)
      probes.append(Probe(f"{what} {codec!r}", x.size, run))
  return probes


def updates(mesh: jax.sharding.Mesh, largest: int, count: int) -> list[Probe]:
  """Updates of parameters by gradients that are there."""
  probes = []
  for rows in _rows(largest, count):
    x = _floats(rows, _COLUMNS)
    run = _in_place(mesh, lambda p, g: (p - 0.1 * g, ()), x, x)
    probes.append(Probe("update", x.size, run))
  return probes


def collectives(
  mesh: jax.sharding.Mesh, largest: int, count: int
) -> list[Probe]:
  """Collectives of float32, by payload bytes."""
  workers = mesh.size
  sharding = jax.sharding.NamedSharding(mesh, P("axis"))
  probes = []
  for rows in _rows(largest, count):
    own = -(-rows * _COLUMNS // workers) * workers
    x = _put(np.ones(own * workers, np.float32), sharding)
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


class Turns:
  """Probes that are timed in turns.

  Args:
    mesh: the devices that work at once.
    probes: what to time.
    barrier: waits for other processes that measure too.
  """

  def __init__(
    self,
    mesh: jax.sharding.Mesh,
    probes: Sequence[Probe],
    barrier: Callable[[], object] = lambda: None,
  ):
    self._probes, self._barrier = probes, barrier
    self._empty = _everywhere(mesh, lambda x: x + 1, _floats(1))
    self._times: list[list[float]] = []
    self._turn()

  def run(self) -> None:
    """Times every probe once; the turn before the first is not counted."""
    self._times.append(self._turn())

  def _turn(self) -> list[float]:
    seconds = []
    for run in (self._empty, *(probe.run for probe in self._probes)):
      self._barrier()
      begin = time.perf_counter()
      run()
      seconds.append(time.perf_counter() - begin)
    return seconds

  def curves(self) -> tuple[float, dict[str, Curve]]:
    """What was measured so far.

    Returns:
      Seconds of calling an empty program, and the curves without them. Sizes
      that cannot be told from an empty program are not on their curve, but for
      the largest.
    """
    times = np.array(self._times)
    call_s, call_noise_s = undisturbed(times[:, 0])
    points: dict[str, list[Point]] = {}
    for probe, column in zip(self._probes, times.T[1:], strict=True):
      second, spread = undisturbed(column)
      point = Point(probe.size, second - call_s, spread / second)
      points.setdefault(probe.curve, []).append(point)
    curves = {k: make_curve(v, call_noise_s) for k, v in points.items()}
    return call_s, _with_differences(curves, call_noise_s)


class Point(NamedTuple):
  """A size and what it takes, with its noise relative to that."""

  size: float
  seconds: float
  noise: float


def undisturbed(times: np.ndarray) -> tuple[float, float]:
  """What something takes on a machine of which others use a part at times.

  Whatever they do only adds to it, so it is the lower quartile; where nobody
  else is there, that is the median but for the noise.

  Args:
    times: of its repeats.

  Returns:
    The lower quartile, and half of the spread (10th to 90th percentile).
  """
  low, second, high = np.percentile(times, (10, 25, 90))
  return float(second), float(high - low) / 2


def make_curve(points: list[Point], least_s: float) -> Curve:
  """The curve through points, without those that are lost in the noise.

  Args:
    points: in any order; the largest is kept whatever it takes.
    least_s: seconds of noise; others that take no more are left out.
  """
  *smaller, largest = sorted(points)
  kept = [point for point in smaller if point.seconds > least_s]
  sizes, seconds, noise = zip(*kept, largest, strict=True)
  return Curve(
    sizes=tuple(map(float, sizes)),
    seconds=tuple(_rising(np.maximum(seconds, _LEAST_S))),
    noise=statistics.median(noise),
  )


def _rising(seconds: Iterable[float]) -> list[float]:
  """What never falls and is nearest: the means of what falls, pooled."""
  pools: list[tuple[float, int]] = []
  for second in seconds:
    mean, count = float(second), 1
    while pools and pools[-1][0] > mean:
      before, more = pools.pop()
      mean = (before * more + mean * count) / (more + count)
      count += more
    pools.append((mean, count))
  return [mean for mean, count in pools for _ in range(count)]


def _with_differences(
  curves: dict[str, Curve], least_s: float
) -> dict[str, Curve]:
  """What a codec adds to an update: one payload, and one more."""
  found = {k: c for k, c in curves.items() if k.split()[0] not in _UPDATES}
  for name, one in curves.items():
    what, _, codec = name.partition(" ")
    if what == "one":
      two = curves[f"two {codec}"]
      found[f"decode {codec}"] = _less(one, curves["update"], least_s)
      found[f"add {codec}"] = _less(two, one, least_s)
  return found


def _less(whole: Curve, part: Curve, least_s: float) -> Curve:
  points = [
    Point(size, seconds - part.seconds_at(size), whole.noise)
    for size, seconds in zip(whole.sizes, whole.seconds, strict=True)
  ]
  return make_curve(points, least_s)


def _probe(
  mesh: jax.sharding.Mesh, fn: Callable[..., Any], *args: Any
) -> Probe:
  """A function of one kernel, at the size that the model gives it."""
  (kernel,) = perfmodel.predict_cost(fn, *args).kernels
  name, size = kernel_curve(kernel)
  return Probe(name, size, _everywhere(mesh, fn, *args))


def _everywhere(
  mesh: jax.sharding.Mesh, fn: Callable[..., Any], *args: Any
) -> Callable[[], Any]:
  """Runs a function on every device, each with arguments of its own."""
  program = _on_each(mesh, lambda args: fn(*args))
  return _compiled(program, _copies(mesh, args))


def _in_place(
  mesh: jax.sharding.Mesh, fn: Callable[..., Any], carry: Any, *args: Any
) -> Callable[[], Any]:
  """Runs `fn(carry, *args) -> carry, out` on every device, over and over."""
  program = _on_each(mesh, lambda both: fn(both[0], *both[1]))
  carry, args = _copies(mesh, carry), _copies(mesh, args)
  jitted = jax.jit(lambda carry, args: program((carry, args)), donate_argnums=0)
  compiled = jitted.lower(carry, args).compile()
  kept = [carry]

  def run() -> None:
    kept[0], out = compiled(kept[0], args)
    jax.block_until_ready((kept[0], out))

  return run


def _on_each(
  mesh: jax.sharding.Mesh, fn: Callable[[Any], Any]
) -> Callable[..., Any]:
  def local(args: Any) -> Any:
    out = fn(jax.tree.map(lambda a: a[0], args))
    return jax.tree.map(lambda a: a[None], out)

  return jax.shard_map(
    local, mesh=mesh, in_specs=P("axis"), out_specs=P("axis")
  )


def _copies(mesh: jax.sharding.Mesh, tree: Any) -> Any:
  """Arrays with a leading axis of devices, each with its own copy."""
  sharding = jax.sharding.NamedSharding(mesh, P("axis"))
  return jax.tree.map(
    lambda a: _put(np.stack([np.asarray(a)] * mesh.size), sharding), tree
  )


def _put(x: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
  """The part of an array that this process has, on its devices."""
  return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i].copy())


def _compiled(fn: Callable[..., Any], arg: Any) -> Callable[[], Any]:
  compiled = jax.jit(fn).lower(arg).compile()
  return lambda: jax.block_until_ready(compiled(arg))


def _copy(mesh: jax.sharding.Mesh, host: np.ndarray) -> Callable[[], Any]:
  devices = [d for d in mesh.devices.flat if d in jax.local_devices()]
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


def _rows(largest: int, count: int) -> list[int]:
  """Powers of two, as parameters have: others can take three times as long."""
  spaced = _spaced(_SMALLEST / _COLUMNS, largest / _COLUMNS, count)
  return sorted({2 ** round(math.log2(rows)) for rows in spaced})
