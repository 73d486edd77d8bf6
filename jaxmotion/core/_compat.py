"""Mesh axes, varying types, bits, and everything that depends on JAX's version.

Inside `shard_map(check_vma=True)` the type of a value holds the axes over which
it varies. `pmap`, `vmap` and `check_vma=False` bind axis names but track
nothing: there `varying` is empty for every value and casts do nothing.
`tracks_varying` tells the two apart.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxmotion.core import _tree


class _LateModule:
  """Stands for a module of `jax.extend` until one of its names is used.

  >>> _LateModule("core").Literal.__name__
  'Literal'
  """

  # `import jax.extend` loads Pallas, which takes as long as all modules of the
  # quickstart together. Only programs that are traced need it.

  def __init__(self, module: str):
    self._module = module

  def __getattr__(self, name: str) -> Any:
    """Loads the module and returns one of its names."""
    from jax import extend

    value = getattr(getattr(extend, self._module), name)
    # The next use finds the name without this function.
    setattr(self, name, value)
    return value


if TYPE_CHECKING:
  from jax.extend import core, random, source_info_util as source_info_util

  jax_core, jax_random = core, random
else:
  jax_core = _LateModule("core")
  jax_random = _LateModule("random")
  source_info_util = _LateModule("source_info_util")


def spec_axes(entry: Any) -> tuple[Any, ...]:
  """Returns the axis names in one entry of a PartitionSpec.

  >>> spec_axes(None), spec_axes("data"), spec_axes(("host", "device"))
  ((), ('data',), ('host', 'device'))
  """
  # `PartitionSpec.UNCONSTRAINED` is returned as if it were a name.
  return () if entry is None else _tree.axis_names(entry)


def filter_spec(
  spec: PartitionSpec, keep: Callable[[Any], bool]
) -> PartitionSpec:
  """Returns a spec without the axes that are not to be kept.

  >>> filter_spec(PartitionSpec("data", ("model", "data")), "model".__eq__)
  P(None, 'model')
  """

  def filter_entry(entry: Any) -> Any:
    names = spec_axes(entry)
    kept = tuple(filter(keep, names))
    return entry if kept == names else kept or None

  return PartitionSpec(*map(filter_entry, spec))


def axis_is_bound(axis_name: _tree.AxisName) -> bool:
  """Returns whether every name is an axis of an enclosing shard_map or pmap."""
  try:
    for name in _tree.axis_names(axis_name):
      lax.axis_size(name)
  except NameError:
    return False
  return True


def axis_size(axis_name: _tree.AxisName) -> int:
  """Returns the number of workers along the axis (a static int)."""
  try:
    return math.prod(map(lax.axis_size, _tree.axis_names(axis_name)))
  except NameError:
    raise ValueError(
      "`axis_name` must name an axis of the enclosing shard_map or pmap, "
      f"{_describe_unbound(axis_name)}"
    ) from None


def _describe_unbound(axis_name: _tree.AxisName) -> str:
  """Describes an axis that is not bound, beside those that are."""
  mapped = sorted(map(str, _mapped_axes()))
  if not mapped:
    return (
      f"got {axis_name!r}: train by jaxmotion.make_train_step, or take "
      "gradients by jaxmotion.value_and_grad under a plain jax.jit, or call "
      "this inside of jax.shard_map, with a state made by "
      "jaxmotion.bind_mesh(tx, mesh)."
    )
  wrong = [a for a in _tree.axis_names(axis_name) if not axis_is_bound(a)]
  near = difflib.get_close_matches(str(wrong[0]), mapped, n=1)
  end = f"; did you mean {near[0]!r}?" if near else "."
  return f"which has {', '.join(map(repr, mapped))}, got {axis_name!r}{end}"


def worker_index(axis_name: _tree.AxisName) -> _tree.Array:
  """Returns this worker's index along the axis, int32[]."""
  # Raises a ValueError for an axis that no enclosing map binds.
  axis_size(axis_name)
  return lax.axis_index(axis_name)


def varying_axes(x: Any) -> frozenset[Any]:
  """Returns the mesh axes over which `x` is typed as varying."""
  # x: array, or the abstract value of a jaxpr's variable.
  return _aval_of(x).manual_axis_type.varying


def _aval_of(x: Any) -> Any:
  return x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)


def tracks_varying(axis_name: _tree.AxisName) -> bool:
  """Returns whether types record variation over the axis (not under pmap)."""
  return is_varying(worker_index(axis_name), axis_name)


def is_varying(x: Any, axis_name: _tree.AxisName) -> bool:
  """Returns whether `x` is typed as varying over any of the axes."""
  return bool(varying_axes(x) & set(_tree.axis_names(axis_name)))


def shape_varying_like(
  shape: Sequence[int], dtype: Any, sources: _tree.PyTree
) -> jax.ShapeDtypeStruct:
  """Returns the type of an array that is computed from other arrays."""
  # The result varies over all axes of any of its sources.
  axes = frozenset().union(*map(varying_axes, jax.tree.leaves(sources)))
  return jax.ShapeDtypeStruct(
    tuple(shape),
    dtype,
    manual_axis_type=jax.sharding.ManualAxisType(varying=axes),
  )


def abstract_like(x: Any) -> Any:
  """Returns an abstract stand-in for `x`, with which a function can be traced.

  >>> like = abstract_like(1.0)
  >>> like.shape, str(like.dtype)
  ((), 'float32')
  """
  # x: array, shape, or the abstract value of a jaxpr's variable.
  aval = x if isinstance(x, jax.ShapeDtypeStruct) else _aval_of(x)
  kind = aval.manual_axis_type  # None of a shape without one.
  axes = tuple(sorted(kind.varying, key=str)) if kind else ()
  if axes:  # JAX traces with varying arrays, but not with varying shapes.
    return to_varying(jnp.zeros(aval.shape, aval.dtype), axes)
  return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def is_compiler_partitioned(x: Any) -> bool:
  """Says whether a compiler may partition an array over several devices.

  >>> is_compiler_partitioned(jnp.zeros(2))
  False
  """
  mesh = jax.typeof(x).sharding.mesh
  return math.prod(map(mesh.shape.get, mesh.auto_axes)) > 1


def scan_parts(params: Any) -> tuple[jax_core.ClosedJaxpr, int, int]:
  """Returns a scan's body, its number of constants and of carried values."""
  # params: those of the scan's equation.
  body = params["jaxpr"]
  if "num_consts" in params:
    return body, params["num_consts"], params["num_carry"]
  consts, carry, _ = params["ft_in"].unpack()  # From JAX 0.11 on.
  return body, len(consts.vals), len(carry.vals)


def to_varying(tree: _tree.PyTree, axis_name: _tree.AxisName) -> _tree.PyTree:
  """Types every leaf as varying over the axis; the elements do not change."""
  # In the order of `axis_name`: a set's order differs between processes.
  mapped = tuple(
    filter(_mapped_axes().__contains__, _tree.axis_names(axis_name))
  )

  def cast_leaf(x: Any) -> Any:
    varying = jax.typeof(x).manual_axis_type.varying
    names = tuple([name for name in mapped if name not in varying])
    # Without this cast, `jax.grad` with respect to replicated parameters
    # inserts an uncompressed psum of the gradient.
    return lax.pcast(x, names, to="varying") if names else x

  return jax.tree.map(cast_leaf, tree)


def to_varying_like(
  tree: _tree.PyTree, like: _tree.PyTree, axis_name: _tree.AxisName
) -> _tree.PyTree:
  """Types reduced leaves like their sources over all axes but the workers'."""
  # Branches must return values of one type. An empty array may depend on
  # nothing, and one that travels beside others is typed as they are.
  axes = frozenset().union(*map(varying_axes, jax.tree.leaves(like)))
  others = tuple(sorted(axes - set(_tree.axis_names(axis_name)), key=str))
  return to_varying(tree, others) if others else tree


def restore_varying(x: _tree.Array, like: _tree.Array) -> _tree.Array:
  """Types an array as varying over the mesh axes of another alone."""
  # Operations on several arrays type all results as varying where any is.
  extra = varying_axes(x) - varying_axes(like)
  return assert_replicated(x, tuple(sorted(extra, key=str))) if extra else x


def gather_replicated(
  x: _tree.Array,
  axis_name: _tree.AxisName,
  axis: int = 0,
  *,
  tiled: bool = False,
) -> _tree.Array:
  """Returns every worker's array, typed as equal on all workers."""
  # In `vmap` there are no such types, and JAX refuses to be asked for one.
  to = (
    "invarying"
    if set(_tree.axis_names(axis_name)) & _mapped_axes()
    else "varying"
  )
  # axis: of the workers, in the result; with `tiled`, arrays are concatenated
  # along it.
  return lax.all_gather(x, axis_name, axis=axis, tiled=tiled, to=to)


def _mapped_axes() -> set[Any]:
  """Returns the axes of enclosing maps over devices; `vmap` adds none."""
  return set(jax.sharding.get_abstract_mesh().manual_axes)


@functools.cache
def _replicated_primitive() -> jax_core.Primitive:
  """Returns the primitive that changes the type of a value and no bit of it."""
  primitive = jax_core.Primitive("assert_replicated")
  primitive.def_impl(lambda x, axes: x)
  primitive.def_abstract_eval(_replicated_type)
  mlir.register_lowering(primitive, lambda ctx, x, axes: [x])
  batching.defvectorized(primitive)
  return primitive


def _replicated_type(x: Any, axes: tuple[Any, ...]) -> Any:
  kind = x.manual_axis_type
  return x.update(
    manual_axis_type=kind.update(varying=kind.varying - set(axes))
  )


def assert_replicated(
  tree: _tree.PyTree, axis_name: _tree.AxisName
) -> _tree.PyTree:
  """Types every leaf as replicated over the axis; the caller guarantees it."""
  # JAX knows that the result of `all_gather` is replicated. A gather that is
  # built from other collectives needs this assertion. Its arrays must have the
  # same bits on every worker.
  axes = _tree.axis_names(axis_name)
  bind = _replicated_primitive().bind
  return jax.tree.map(lambda x: bind(x, axes=axes), tree)


def is_local(x: Any) -> bool:
  """Says whether this process has a whole array.

  >>> is_local(jnp.ones(2)), is_local(1.0)
  (True, True)
  """
  return not isinstance(x, jax.Array) or x.is_fully_addressable


def is_inexact(x: Any) -> bool:
  """Says whether an array of this type has a gradient.

  >>> is_inexact(1.0), is_inexact(1)
  (True, False)
  """
  # x: array, number, ShapeDtypeStruct or abstract value.
  dtype = x.dtype if hasattr(x, "dtype") else jax.typeof(x).dtype
  return jnp.issubdtype(dtype, jnp.inexact)


def is_key(x: Any) -> bool:
  """Returns whether an array has typed PRNG keys."""
  dtype = getattr(x, "dtype", None)
  return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def trace_in_place(
  fn: Callable[..., _tree.PyTree],
) -> Callable[..., _tree.PyTree]:
  """Returns a function that writes its operations into the enclosing trace."""
  # Functions of `jax.numpy` are jitted one by one. JAX traces each of them for
  # each type of operand, and writes a call or copies the equations. An encoder
  # has tens of them, and is traced in half the time without. The values are the
  # same. Outside of traces nothing changes. `fn` must have no loops: they would
  # be unrolled.

  @functools.wraps(fn)
  def wrapped(*args: Any, **kwargs: Any) -> _tree.PyTree:
    leaves = jax.tree.leaves((args, kwargs))
    if not any(isinstance(x, jax.core.Tracer) for x in leaves):
      return fn(*args, **kwargs)
    with jax.disable_jit():
      return fn(*args, **kwargs)

  return wrapped


def trace_once(fn: Callable[..., _tree.PyTree]) -> Callable[..., _tree.PyTree]:
  """Returns a function that is traced once for all arguments of some types."""
  # A program holds its operations for each call, as if it was traced each time.
  jitted = jax.jit(fn, inline=True)

  @functools.wraps(fn)
  def call(*args: Any) -> _tree.PyTree:
    with jax.disable_jit(False):
      return jitted(*args)

  return call


def draws_by_place(key: Any) -> bool:
  """Returns whether `draw_bits` knows the random bits of one key."""
  config: Any = jax.config  # Its names have no types.
  return (
    key.shape == ()
    and str(jax.random.key_impl(key)) == "threefry2x32"
    and config.jax_threefry_partitionable
  )


def draw_bits(key: Any, places: jax.Array) -> jax.Array:
  """Returns what `jax.random.bits` draws at places of a large array."""
  # Threefry enciphers the place of an element, a number of 64 bits.
  # places: uint32 indices into the flat array.
  high, low = jax.random.key_data(key)
  bind = jax_random.threefry2x32_p.bind
  first, second = bind(high, low, jnp.zeros_like(places), places)
  return first ^ second


def list_platforms() -> Collection[str]:
  """Returns the platforms on which a traced program may run."""
  # A program of a mesh runs on its devices, which may be absent. Another one
  # may be lowered for any device of the process. GPUs are "cuda" or "rocm".
  device = jax.sharding.get_abstract_mesh().abstract_device
  if device is None:
    return _own_platforms()
  if device.platform != "gpu":
    return {device.platform}
  return {"cuda" if device.device_kind.startswith("NVIDIA") else "rocm"}


@functools.cache
def _own_platforms() -> Collection[str]:
  platforms = {"cpu"}
  for platform in ("cuda", "rocm", "tpu"):
    with contextlib.suppress(RuntimeError):
      jax.devices(platform)
      platforms.add(platform)
  return platforms


def find_free_axes() -> dict[Any, int]:
  """Returns the axes, with their sizes, that no enclosing map made manual."""
  # There are none outside of maps. Those of one device are left out.
  mesh = jax.sharding.get_abstract_mesh()
  if not mesh.manual_axes:
    return {}
  return {
    name: mesh.shape[name]
    for name in mesh.axis_names
    if name not in mesh.manual_axes and mesh.shape[name] > 1
  }


def eval_shape_in_map(
  fun: Callable[..., Any], map_options: Mapping[str, Any], *args: _tree.PyTree
) -> _tree.PyTree:
  """Returns the types of a function's results inside of a map over workers."""
  # The specs of a map's results may depend on what the function returns. So
  # `fun` is traced once for its types alone.
  find_types = lambda *local: jax.tree.map(jax.typeof, fun(*local))
  return call_in_map(find_types, map_options, *args)


def call_in_map(
  fun: Callable[..., Any], map_options: Mapping[str, Any], *args: _tree.PyTree
) -> Any:
  """Returns what a function, traced inside of a map, says of its arguments."""
  # fun: returns no tracers. map_options: arguments of `jax.shard_map` but
  # `out_specs`; args: whole arrays.
  results = []

  def trace(*local: _tree.PyTree) -> jax.Array:
    results.append(fun(*local))
    return jnp.zeros(())

  probe = jax.shard_map(trace, out_specs=PartitionSpec(), **map_options)
  jax.eval_shape(probe, *args)
  return results[0]


def without_context_mesh() -> Any:
  """Returns a context in which no mesh is that of `jax.set_mesh`."""
  # Maps over another mesh, of workers that are not there, would be refused.
  return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def put_on_mesh(
  tree: _tree.PyTree, mesh: Mesh, specs: _tree.PyTree
) -> _tree.PyTree:
  """Moves arrays to a mesh that are committed to other devices."""
  # A compiled function refuses such arrays, which checkpoints and
  # `jax.device_put(x, device)` give. It places all others by itself.
  # specs: a prefix of the tree.

  def put_leaf(x: Any, spec: PartitionSpec) -> Any:
    if is_on_mesh(x, mesh):
      return x
    return jax.device_put(x, NamedSharding(mesh, spec))

  return jax.tree.map(put_leaf, tree, jax.tree.broadcast(specs, tree))


def is_on_mesh(x: Any, mesh: Mesh) -> bool:
  """Says whether a function over a mesh can be called with a leaf."""
  if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
    return True
  return not x.committed or x.sharding.device_set == set(mesh.devices.flat)


def check_on_mesh(args: Mapping[str, _tree.PyTree], mesh: Mesh) -> None:
  """Raises if an array is bound to other devices than those of a mesh."""
  for name, tree in args.items():
    for path, leaf in _tree.named_leaves(tree):
      if is_on_mesh(leaf, mesh):
        continue
      devices = sorted(leaf.sharding.device_set, key=lambda d: d.id)
      names = ", ".join(f"{d.platform}:{d.id}" for d in devices)
      raise ValueError(
        f"`{'/'.join(filter(None, (name, path)))}` must be on the {mesh.size} "
        f"devices of the mesh, got an array on {names}: give a NumPy array, or "
        "call jax.device_put(x, jax.NamedSharding(mesh, spec))."
      )


def place_tree(
  tree: _tree.PyTree, mesh: Mesh | AbstractMesh, specs: _tree.PyTree
) -> _tree.PyTree:
  """Gives arrays the sharding that a map over explicit axes asks for."""
  # JAX moves arrays to the sharding of a map by itself, but for explicit axes,
  # where it raises an error instead.
  # specs: a prefix of the tree.
  if jax.sharding.AxisType.Explicit not in mesh.axis_types:
    return tree
  shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
  return jax.sharding.reshard(tree, shardings)


def word_dtype(dtype: Any) -> jnp.dtype:
  """Returns the unsigned integer dtype that is as wide as another dtype.

  >>> word_dtype("bfloat16").name
  'uint16'
  """
  return jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")


def to_bits(x: _tree.Array) -> _tree.Array:
  """Returns the bits of an array as unsigned words of the same width.

  >>> hex(to_bits(jnp.float32(-0.0)))
  '0x80000000'
  """
  # x: any dtype of 1, 2, 4 or 8 bytes.
  return lax.bitcast_convert_type(x, word_dtype(x.dtype))


def from_bits(words: _tree.Array, dtype: Any) -> _tree.Array:
  """Returns the array whose bits are these words; inverts `to_bits`.

  >>> float(from_bits(to_bits(jnp.float32(1.5)), "float32"))
  1.5
  """
  # words: unsigned, as wide as `dtype`.
  return lax.bitcast_convert_type(words, jnp.dtype(dtype))


def select_or(which: _tree.Array, x: _tree.Array, value: float) -> _tree.Array:
  """Returns the elements of `x` where a condition holds, elsewhere a constant.

  >>> select_or(jnp.array([True, False]), jnp.ones(2), 5.0).tolist()
  [1.0, 5.0]
  """
  # As `jnp.where(which, x, value)`, which takes four times as long to trace.
  # which: bool[], or bool of the shape of `x`.
  return lax.select(which, x, lax.full_like(x, value))


def saturate_cast(x: _tree.Array, dtype: Any) -> _tree.Array:
  """Rounds to another float; finite elements saturate, others stay."""
  # A plain cast turns finite elements beyond the greatest float of a narrower
  # dtype into infinities.
  most = float(jnp.finfo(dtype).max)
  if most >= float(jnp.finfo(x.dtype).max):
    return x.astype(dtype)
  # Wide first: bfloat16 does not hold the greatest float16.
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  # Not `clip` alone, which on a GPU may turn NaN into a number.
  clipped = jnp.where(jnp.isfinite(wide), jnp.clip(wide, -most, most), wide)
  return clipped.astype(dtype)
