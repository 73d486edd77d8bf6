"""Arguments and parameters of training steps: checks, specs and placement."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxmotion import core
from jaxmotion.core import AxisName, PyTree
from jaxmotion.transforms import _init_state, _model_axes, _states

# Values of static arguments with their names and types: 1 is not True.
Static = tuple[tuple[str, type, Any], ...]


def is_key(x: Any) -> bool:
  """Returns whether an array has typed PRNG keys."""
  dtype = getattr(x, "dtype", None)
  return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def is_raw_key(x: Any) -> bool:
  """Returns whether an argument or result is like `jax.random.PRNGKey(0)`."""
  return getattr(x, "shape", None) == (2,) and x.dtype == jnp.uint32


def one_or_several(cls: type, noun: str, kind: core.Kind) -> core.Kind:
  """Makes the kind of values of a class, alone or in a list, as a tuple."""
  several = core.sequence(noun, kind)
  return lambda name, value: (
    (kind(name, value),) if isinstance(value, cls) else several(name, value)
  )


_names = one_or_several(str, "strings", core.text)
_positions = one_or_several(int, "positions", core.integer(-(2**31), 2**31 - 1))


def step_key(name: str, key: Any) -> Any:
  """Returns one key of `jax.random`, typed or raw, or None; or raises."""
  if key is None:
    return None
  dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
  is_typed = is_key(key) and shape == ()
  is_raw = dtype == jnp.uint32 and shape is not None and len(shape) == 1
  if not (is_typed or is_raw):
    found = f"{dtype}{list(shape)}" if shape is not None else f"{key!r:.200}"
    raise TypeError(
      f"`{name}` must be one key of jax.random.key(seed), got {found}."
    )
  return key


def split_specs(
  name: str,
  batch: PyTree,
  mesh: Mesh,
  axis_name: AxisName,
  microbatches: int = 1,
  *,
  optional: bool = False,
) -> PyTree:
  """Returns the specs of a batch that is split along its leading axis."""
  # microbatches: number of parts that divide a worker's examples. Scalars are
  # replicated.
  workers = _states.count_devices(axis_name, mesh.shape)

  def find_spec(path: str, leaf: Any) -> P:
    """Returns the spec of a leaf; raises unless its rows can be divided."""
    at = f" at `{path}`" if path else ""
    shape = jnp.shape(leaf)
    if not shape and is_key(leaf):
      raise ValueError(
        f"`{name}` must not hold a key for all workers, who would draw the "
        f"same numbers, got one{at}: give the key to the step by itself."
      )
    if not shape:
      return P()
    if not shape[0] or shape[0] % workers:
      raise ValueError(
        f"`{name}` must have leaves with a leading axis of examples that "
        f"{workers} workers divide, got shape {shape}{at}: drop or pad the "
        "last examples."
      )
    own = shape[0] // workers
    if own % microbatches:
      raise ValueError(
        f"`microbatches` must divide the {own} examples of a worker, got "
        f"{microbatches} for a `{name}` of shape {shape}{at}."
      )
    return P(axis_name)

  leaves = core.named_leaves(batch)
  if not leaves and not (optional and batch is None):
    raise ValueError(f"`{name}` must have a leaf with examples, got {batch!r}.")
  specs = [find_spec(path, leaf) for path, leaf in leaves]
  # Workers would broadcast their parts where the whole batch does not fit. Keys
  # are left out: there may be one for each worker.
  rows = [
    (path, leaf.shape[0])
    for path, leaf in leaves
    if jnp.ndim(leaf) and not is_key(leaf)
  ]
  for path, count in rows:
    first, wanted = rows[0]
    if count != wanted:
      raise ValueError(
        f"`{name}` must have leaves with as many rows as one another, got "
        f"{wanted} at `{first}` and {count} at `{path}`."
      )
  return jax.tree.unflatten(jax.tree.structure(batch), specs)


def place_arguments(
  tree: PyTree, mesh: Mesh, specs: PyTree, axis_name: AxisName
) -> PyTree:
  """Puts arrays on the mesh, where a compiled step returns them."""
  # Otherwise the second call of the step would compile again.
  # specs: one for each leaf, over the workers; how arrays are split over other
  # axes stays. So do tracers and what is no array of JAX.
  workers = set(core.axis_names(axis_name))

  def place_leaf(x: Any, spec: P) -> Any:
    """Moves an array unless it is split over the workers as it should be."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
      return x
    sharding = NamedSharding(mesh, spec)
    old = x.sharding
    if isinstance(old, NamedSharding) and old.mesh == mesh:
      held, wanted = map(_model_axes.sharded_axes, (old.spec, spec))
      if workers & held == workers & wanted:
        return x
      if workers & held:
        raise ValueError(
          f"An argument that all workers hold must not be split over "
          f"{axis_name!r}, got {core.shape_string(x)} of {old.spec}: name data "
          "in `batch`, and train shards by `jaxmotion.fully_sharded`."
        )
    if old.is_equivalent_to(sharding, x.ndim):
      return x
    return jax.device_put(x, sharding)

  return jax.tree.map(place_leaf, tree, specs)


class StepParameters:
  """Parameters of a step of one's own: which are split, static, donated."""

  @core.declare(fun=core.function)
  def __init__(
    self, fun: Any, split: Sequence[str], options: Mapping[str, Sequence[Any]]
  ) -> None:
    self._fun = fun
    self._signature = inspect.signature(fun)
    self.name = getattr(fun, "__name__", type(fun).__name__)
    self.split = tuple(split)
    self._check_names("batch", split)
    self.static = self._choose(options, "static")
    self.donated = self._choose(options, "donate")
    for name, others in (
      ("batch", self.split),
      ("donate_argnames", self.donated),
    ):
      if both := set(others) & set(self.static):
        raise ValueError(
          f"`{name}` must name no static parameters, got {sorted(both)}."
        )

  def bind(
    self, args: Sequence[Any], kwargs: Mapping[str, Any]
  ) -> tuple[dict[str, PyTree], Static]:
    """Binds a call: traced arguments by name, and the values of static ones."""
    # Defaults of the step are left to it, as `jax.jit` leaves them.
    bound = self._signature.bind(*args, **kwargs)
    traced = dict(bound.arguments)
    for name in (*self.split, *self.donated):
      default = self._signature.parameters[name].default
      if name not in traced and default is not inspect.Parameter.empty:
        traced[name] = default
    static = []
    for name in self.static:
      if name in traced:
        value = traced.pop(name)
        static.append((name, type(value), value))
        try:
          hash(value)
        except TypeError as error:
          raise TypeError(
            f"`{name}` must be hashable, because it is static, got "
            f"{value!r:.200}."
          ) from error
    return traced, tuple(static)

  def call(self, traced: Mapping[str, PyTree], static: Static) -> Any:
    """Calls the step with arguments that `bind` returned."""
    # traced: arguments by name, as one worker sees them.
    bound = self._signature.bind_partial()
    bound.arguments.update(traced)
    bound.arguments.update({name: value for name, _, value in static})
    return self._fun(*bound.args, **bound.kwargs)

  def _check_names(self, argument: str, names: Sequence[str]) -> None:
    """Raises unless names are those of parameters of the step."""
    for name in names:
      if name not in self._signature.parameters:
        listed = ", ".join(self._signature.parameters)
        raise ValueError(
          f"`{argument}` must name parameters of the step ({listed}), got "
          f"{name!r}."
        )

  def _choose(
    self, options: Mapping[str, Sequence[Any]], kind: str
  ) -> tuple[str, ...]:
    """Returns the parameters that `..._argnames` and `..._argnums` choose."""
    names = options[f"{kind}_argnames"]
    numbers = options[f"{kind}_argnums"]  # From the end if negative.
    self._check_names(f"{kind}_argnames", names)
    known = list(self._signature.parameters)
    for number in numbers:
      if not -len(known) <= number < len(known):
        raise ValueError(
          f"`{kind}_argnums` must be positions of the step's {len(known)} "
          f"parameters, got {number}."
        )
    return tuple(dict.fromkeys([*names, *(known[i] for i in numbers)]))


@core.declare(batch=_names)
def make_decorator(
  map_step: Callable[..., Callable[..., Any]],
  mesh: Mesh,
  axis_name: AxisName,
  batch: str | Sequence[str],
  **options: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
  """Makes the decorator `parallelize_step`, for functions or for modules."""
  # map_step: (step, its parameters, mesh, axis_name) -> jitted step.
  # options: static and donated parameters, as `jax.jit` takes them.
  axis_name = _init_state.check_mesh(mesh, axis_name)
  if not batch:
    raise ValueError(
      f"`batch` must name a parameter of the step at least, got {batch!r}."
    )
  checked = {
    name: (_names if name.endswith("names") else _positions)(name, value)
    for name, value in options.items()
  }

  def decorate(fun: Callable[..., Any]) -> Callable[..., Any]:
    parameters = StepParameters(fun, batch, checked)
    return map_step(fun, parameters, mesh, axis_name)

  return decorate
