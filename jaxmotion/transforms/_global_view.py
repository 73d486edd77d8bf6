"""Gradients of a loss over the whole batch, not yet summed over workers."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmotion import collectives, core, program
from jaxmotion.codecs import Codec
from jaxmotion.collectives import extend
from jaxmotion.core import AxisName, PyTree
from jaxmotion.transforms import _init_state, _model_axes


class UnsummedGradient:
  """Gradient of one parameter that is not yet summed over workers.

  `jaxmotion.exchange` takes it and returns the mean over workers, an ordinary
  array. Before, it can be added to another, and multiplied or divided by a
  number; any other use is an error, for it would read one worker's part.

  Attributes:
    value: (workers, ...), each worker's own, split between the workers.
    axis_name: the axis (or axes) of the workers.
    mesh: the mesh that has the axis.
    shape: shape of the parameter.
    dtype: element type of the parameter.
  """

  def __init__(self, value: Any, axis_name: AxisName, mesh: Any):
    self.value, self.axis_name, self.mesh = value, axis_name, mesh
    self.shape, self.dtype = value.shape[1:], value.dtype

  def _with(self, value: Any) -> "UnsummedGradient":
    return UnsummedGradient(value, self.axis_name, self.mesh)

  def __add__(self, other: Any) -> "UnsummedGradient":
    if not isinstance(other, UnsummedGradient):
      return NotImplemented
    return self._with(self.value + other.value)

  def __mul__(self, factor: Any) -> "UnsummedGradient":
    if isinstance(factor, UnsummedGradient) or jnp.ndim(factor):
      return NotImplemented
    return self._with(self.value * factor)

  __rmul__ = __mul__

  def __truediv__(self, divisor: Any) -> "UnsummedGradient":
    if isinstance(divisor, UnsummedGradient) or jnp.ndim(divisor):
      return NotImplemented
    return self._with(self.value / divisor)

  def __neg__(self) -> "UnsummedGradient":
    return self._with(-self.value)

  def __repr__(self) -> str:
    # JAX shows it where it refuses to read the gradient.
    shape = core.shape_string(self)
    return f"UnsummedGradient of {shape}, which `jaxmotion.exchange` sums first"

  def __getattr__(self, name: str) -> Any:
    raise AttributeError(
      "A gradient must be summed over workers before anything else reads it, "
      f"got `{name}` of one that is not: put `jaxmotion.exchange` first in the "
      "optimizer's chain, and take norms of the updates that it returns."
    )


def _positions(name: str, value: Any) -> Any:
  """Returns one position, or distinct ones as a tuple; or raises."""
  if isinstance(value, int):
    return core.integer(0)(name, value)
  numbers = core.sequence("integers", core.integer(0))(name, value)
  if len(set(numbers)) != len(numbers) or not numbers:
    raise ValueError(f"`{name}` must be distinct positions, got {value!r}.")
  return numbers


@core.declare(
  fun=core.function,
  argnums=_positions,
  has_aux=core.boolean,
  axis_name=core.worker_axes,
  specs=_model_axes.partition_specs,
  weight_codec=extend.stateless,
  gradient_codec=extend.stateless,
)
def value_and_grad(
  fun: Callable[..., Any],
  argnums: int | Sequence[int] = 0,
  has_aux: bool = False,
  *,
  axis_name: AxisName = "data",
  specs: PyTree | None = None,
  weight_codec: Codec | None = None,
  gradient_codec: Codec | None = None,
) -> Callable[..., Any]:
  """Makes a function of a loss's value and of gradients to be exchanged.

  It stands where `jax.value_and_grad` stood, under an ordinary `jax.jit`. The
  loss sees the whole batch, so that masked means, norms and all else that it
  returns are what they were. Only the gradients are each worker's own:
  `exchange` in the optimizer's chain is the one place that adds them up. Their
  mean over workers is the gradient of the loss.

  The loss is traced once, and evaluated in a map over the workers' axis. There
  every operation gets a worker's part of the batch. Operations along the batch
  send what they need: sums are summed over workers, and what has no rule of its
  own is gathered first.

  Args:
    fun: loss function; it returns a scalar, or with `has_aux` a pair.
    argnums: which arguments are differentiated: parameters, which all workers
      hold.
    has_aux: whether `fun` returns a pair of the loss and other results.
    axis_name: the axis (or axes) of the mesh that the batch is split over.
      Arrays of the other arguments, and those that `fun` closes over, are
      taken to be split along their leading dimension if the workers divide it,
      but for arrays that all of their uses need whole. Others are what all
      workers hold. Either is right; the wrong one sends more.
    specs: how the workers share parameters out (FSDP), a PartitionSpec for each
      or for all; with several `argnums`, a tuple. Weights are then gathered at
      each use, and gradients are ordinary arrays, sharded as the parameters
      are: there is nothing left to exchange. None: all workers hold them.
    weight_codec: codec of weights that are gathered, without state and random
      numbers; None is full precision.
    gradient_codec: codec of the gradients of these weights, likewise.

  Returns:
    A function of the arguments of `fun` that returns what that of
    `jax.value_and_grad` returns, with unsummed gradients: each can be added to
    another, and scaled by a number. All else raises an error. Call it
    inside `jax.jit`, with arguments on the mesh or under `jax.set_mesh`.

  Raises:
    TypeError: an argument of another type.
    ValueError: no argument is on a mesh that has the axis, a parameter is
      sharded over it without `specs`, `specs` do not fit, or `fun` holds a
      `jax.shard_map` over it.

  Example:
    >>> import optax
    >>> from jaxmotion import codecs, transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
    >>> tx = optax.chain(
    ...   transforms.exchange("data", codecs.uniform(bits=8)), optax.sgd(0.5)
    ... )
    >>> def loss_fn(params, batch):  # The mean of what the mask leaves.
    ...   errors = (batch["x"] @ params - batch["y"]) ** 2
    ...   return jnp.sum(errors * batch["mask"]) / jnp.sum(batch["mask"])
    >>> @jax.jit
    ... def train_step(params, opt_state, batch):
    ...   loss, grads = value_and_grad(loss_fn)(params, batch)
    ...   updates, opt_state = tx.update(grads, opt_state, params)
    ...   return optax.apply_updates(params, updates), opt_state, loss
    >>> batch = {"x": jnp.eye(4), "y": jnp.ones(4), "mask": jnp.eye(4)[0]}
    >>> params = jnp.zeros(4)
    >>> with jax.set_mesh(mesh):
    ...   params, _, loss = train_step(params, tx.init(params), batch)
    >>> float(loss), params.round(2).tolist()
    (1.0, [1.0, 0.0, 0.0, 0.0])
  """
  numbers = argnums if isinstance(argnums, tuple) else (argnums,)

  @functools.wraps(fun)
  def run(*args: Any, **kwargs: Any) -> Any:
    if len(args) <= max(numbers):
      raise ValueError(
        f"`argnums` must be positions of arguments, got {argnums} for "
        f"{len(args)}."
      )
    own = [args[i] for i in numbers]
    others = [None if i in numbers else a for i, a in enumerate(args)]
    leaves, treedef = jax.tree.flatten((others, kwargs))

    def call(own: PyTree, held: PyTree, arrays: dict[int, Any]) -> Any:
      del held
      # What is no array, such as a flag or a module, is not traced, as by JAX.
      filled = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
      full, kwargs = jax.tree.unflatten(treedef, filled)
      for i, arg in zip(numbers, own, strict=True):
        full[i] = arg
      return fun(*full, **kwargs)

    arrays = {i: a for i, a in enumerate(leaves) if hasattr(a, "dtype")}
    shared = None
    if specs is not None:
      of_own = specs if isinstance(argnums, tuple) else [specs]
      shared = _SharedWeights(of_own, weight_codec, gradient_codec)
    value, grads = differentiate(
      call, own, (), arrays, has_aux, axis_name, shared
    )
    return value, grads[0] if isinstance(argnums, int) else tuple(grads)

  return run


def grad(
  fun: Callable[..., Any],
  argnums: int | Sequence[int] = 0,
  has_aux: bool = False,
  *,
  axis_name: AxisName = "data",
) -> Callable[..., Any]:
  """Makes a function of gradients to be exchanged; see `value_and_grad`.

  Args:
    fun: loss function; it returns a scalar, or with `has_aux` a pair.
    argnums: which arguments are differentiated.
    has_aux: whether `fun` returns a pair of the loss and other results.
    axis_name: the axis (or axes) of the mesh that the batch is split over.

  Returns:
    A function of the arguments of `fun` that returns the gradients, or with
    `has_aux` a pair of them and the other results.

  Raises:
    TypeError: an argument of another type.

  Example:
    >>> mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
    >>> with jax.set_mesh(mesh):
    ...   @jax.jit
    ...   def find_own(w, x):
    ...     return grad(lambda w, x: jnp.mean(w * x))(w, x).value
    ...   own = find_own(jnp.ones(()), jnp.arange(4.0))
    >>> own.tolist()  # of four workers; their mean is the gradient, 1.5
    [0.0, 1.0, 2.0, 3.0]
  """
  differentiate = value_and_grad(fun, argnums, has_aux, axis_name=axis_name)

  @functools.wraps(fun)
  def run(*args: Any, **kwargs: Any) -> Any:
    value, grads = differentiate(*args, **kwargs)
    return (grads, value[1]) if has_aux else grads

  return run


def differentiate(
  call: Callable[..., Any],
  own: PyTree,
  held: PyTree,
  arrays: PyTree,
  has_aux: bool,
  axis_name: AxisName,
  shared: "_SharedWeights | None" = None,
) -> tuple[Any, PyTree]:
  """Returns what a loss returns, and each worker's gradients by `own`."""
  # held: what all workers hold, beside `own`. arrays: may be of the batch.
  _check_params(own, axis_name, may_share=shared is not None)
  args = own, held, arrays
  mesh = _choose_mesh(call, args, axis_name)
  abstract = getattr(mesh, "abstract_mesh", mesh)
  count = core.count_devices(axis_name, mesh.shape)
  with jax.sharding.use_abstract_mesh(abstract):
    trace = jax.make_jaxpr(call, return_shape=True)
    closed, shapes = trace(*args)
  _check_loss(shapes, has_aux)
  params, params_def = jax.tree.flatten(own)
  given = [
    # A loss that closes over the batch has it among its constants.
    *((a, isinstance(a, jax.core.Tracer)) for a in closed.consts),
    *((a, False) for a in jax.tree.leaves(held)),
    *((a, True) for a in jax.tree.leaves(arrays)),
  ]
  inputs = [a for a, _ in given]
  dims = [_find_dim(a, count) if split else None for a, split in given]
  rows = frozenset(
    a.shape[0] for a, dim in zip(inputs, dims, strict=True) if dim == 0
  )
  own_parts = [program.Part(x) for x in params]
  if shared is not None:
    own_parts = shared.cut(own, axis_name, count)
  opened = closed.jaxpr.replace(
    constvars=[], invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars]
  )
  workers = _WatchedWorkers(axis_name, count, abstract, rows, shared)
  loss = _PartLoss(opened, len(closed.consts), own_parts, dims, workers)
  loss, found = loss.hold_whole(mesh, params, inputs)

  def run_worker(
    params: list[Any], inputs: list[Any]
  ) -> tuple[list[Any], list[Any]]:
    """Returns one worker's results, the loss first, and its gradients."""

    def compute_loss(params: list[Any]) -> tuple[Any, list[Any]]:
      out = [part.array for part in loss.evaluate(params, inputs)]
      return out[0], out

    grads, out = jax.grad(compute_loss, has_aux=True)(params)
    if shared is None:
      # The map joins the gradients of all workers along the new axis.
      return out, [g[None] for g in grads]
    return out, [
      lax.pmean(g, axis_name) if part.dim is None else g / count
      for g, part in zip(grads, loss.own, strict=True)
    ]

  maps = loss.map_options(mesh)
  inputs = loss.place_inputs(mesh, inputs)
  of_grads = P(axis_name) if shared is None else maps["in_specs"][0]
  out_specs = [loss.spec_of(part.dim) for part in found], of_grads
  mapped = jax.shard_map(run_worker, out_specs=out_specs, **maps)
  out, grads = mapped(params, inputs)
  if shared is None:
    grads = [UnsummedGradient(g, axis_name, mesh) for g in grads]
  return (
    jax.tree.unflatten(jax.tree.structure(shapes), out),
    jax.tree.unflatten(params_def, grads),
  )


def _choose_mesh(
  call: Callable[..., Any], args: Any, axis_name: AxisName
) -> Any:
  """Returns the mesh of the workers; raises if nothing says which it is."""
  mesh = _find_mesh(args, axis_name)
  if mesh is None:  # It may be that of a batch that the loss closes over.
    mesh = _find_mesh(jax.make_jaxpr(call)(*args).consts, axis_name)
  if mesh is None:
    raise ValueError(
      "`axis_name` must be an axis of the mesh that arguments are on, got "
      f"{axis_name!r}: place them by `jax.device_put`, or call the step under "
      "`jax.set_mesh`."
    )
  return mesh


@dataclasses.dataclass(frozen=True)
class _PartLoss:
  """Program of a loss on whole arrays, and what of them a worker has."""

  jaxpr: Any  # Takes constants, then parameters, then other arguments.
  consts: int  # How many constants there are.
  own: list[program.Part]  # Parameters.
  dims: list[int | None]  # Of constants and other arguments, the inputs.
  workers: "_WatchedWorkers"

  def evaluate(
    self, params: list[Any], inputs: list[Any]
  ) -> list[program.Part]:
    """Returns what a worker has of the results, from what it has of these."""
    parts = [*map(program.Part, inputs, self.dims)]
    parts[self.consts : self.consts] = [
      dataclasses.replace(part, array=x)
      for part, x in zip(self.own, params, strict=True)
    ]
    workers = self.workers
    return workers.settle(program.evaluate_parts(self.jaxpr, parts, workers))

  def spec_of(self, dim: int | None) -> P:
    """Returns the spec of an array that the workers cut."""
    return P() if dim is None else P(*[None] * dim, self.workers.axis_name)

  def map_options(self, mesh: Any) -> dict[str, Any]:
    """Returns arguments of a map whose function takes what `evaluate` does."""
    own = [part.dim for part in self.own]
    specs = tuple([self.spec_of(d) for d in each] for each in (own, self.dims))
    return _map_options(mesh, self.workers.axis_name, specs)

  def place_inputs(self, mesh: Any, inputs: list[Any]) -> list[Any]:
    """Splits inputs along explicit axes of workers, which JAX refuses to do."""
    workers = core.axis_names(self.workers.axis_name)

    def place(x: Any, dim: int | None) -> Any:
      # Axes of a model stay where they are.
      spec = getattr(getattr(jax.typeof(x), "sharding", None), "spec", P())
      entries = [
        tuple(name for name in core.spec_axes(entry) if name not in workers)
        for entry in [*spec, *[None] * (jnp.ndim(x) - len(spec))]
      ]
      if dim is not None:
        entries[dim] = (*workers, *entries[dim])
      return core.place_tree(x, mesh, P(*(names or None for names in entries)))

    return list(map(place, inputs, self.dims))

  def find_results(
    self, mesh: Any, params: list[Any], inputs: list[Any]
  ) -> tuple[list[program.Part], list[int]]:
    """Returns the types of the results, and how often inputs are gathered."""

    def trace(
      params: list[Any], inputs: list[Any]
    ) -> tuple[list[program.Part], list[int]]:
      found = jax.tree.map(jax.typeof, self.evaluate(params, inputs))
      gathers = collections.Counter(map(id, self.workers.gathered))
      return found, [gathers[id(a)] for a in inputs]

    inputs = self.place_inputs(mesh, inputs)
    return core.call_in_map(trace, self.map_options(mesh), params, inputs)

  def hold_whole(
    self, mesh: Any, params: list[Any], inputs: list[Any]
  ) -> tuple["_PartLoss", list[program.Part]]:
    """Lets all workers hold arrays that each of their uses would gather."""
    # Also returns the types of the results.
    found, gathers = self.find_results(mesh, params, inputs)
    uses = _count_uses(self.jaxpr)
    del uses[self.consts : self.consts + len(params)]
    whole = [n >= used > 0 for n, used in zip(gathers, uses, strict=True)]
    if not any(whole):
      return self, found
    dims = [None if w else d for w, d in zip(whole, self.dims, strict=True)]
    loss = dataclasses.replace(self, dims=dims)
    return loss, loss.find_results(mesh, params, inputs)[0]


class _SharedWeights(NamedTuple):
  """Says how the workers share weights out, and how these are sent."""

  specs: PyTree
  weight_codec: Codec | None
  gradient_codec: Codec | None

  def cut(
    self, params: PyTree, axis_name: AxisName, count: int
  ) -> list[program.Part]:
    """Returns how the workers cut each parameter, or leave it whole."""
    workers = core.axis_names(axis_name)
    specs = jax.tree.leaves(_model_axes.spread_specs(self.specs, params))
    parts = []
    for (path, x), spec in zip(core.named_leaves(params), specs, strict=True):
      names = [core.spec_axes(entry) for entry in spec]
      used = [d for d, axes in enumerate(names) if set(axes) & set(workers)]
      if used and (
        [names[d] for d in used] != [workers]
        or len(spec) > x.ndim
        or x.shape[used[0]] % count
      ):
        raise ValueError(
          f"`specs` must shard one dimension over {axis_name!r} alone, which "
          f"{count} workers divide, got {spec} for {core.shape_string(x)} at "
          f"{path!r}."
        )
      others = [None if d in used else entry for d, entry in enumerate(spec)]
      model = (*others, *[None] * (x.ndim - len(spec)))
      parts.append(program.Part(x, *((used[0], model) if used else ())))
    if all(part.dim is None for part in parts):
      raise ValueError(
        f"`specs` must shard a parameter over {axis_name!r}, got none that "
        "does: leave them out, and put `jaxmotion.exchange` into the chain."
      )
    return parts

  def gather(self, part: program.Part, axis_name: AxisName, count: int) -> Any:
    """Gathers weights through their codec; sums their gradient likewise."""
    assert part.dim is not None and part.model is not None
    whole = collectives.unshard(
      part.array,
      axis_name,
      self.weight_codec,
      self.gradient_codec,
      axis=part.dim,
      spec=P(*part.model),
    )
    # `unshard` takes the mean of gradients, where those of parts are sums.
    return _scale_gradient(whole, count)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _scale_gradient(x: Any, factor: int) -> Any:
  """Returns an array whose gradient is multiplied."""
  return x


_scale_gradient.defvjp(
  lambda x, factor: (x, None), lambda factor, _, g: (g * factor,)
)


@dataclasses.dataclass(frozen=True)
class _WatchedWorkers(program.Workers):
  """Workers that note which arrays they gather."""

  shared: _SharedWeights | None = None
  gathered: list[Any] = dataclasses.field(default_factory=list)

  def whole(self, part: program.Part) -> Any:
    """Returns the whole value, and notes the part."""
    if self.shared is not None and part.model is not None:
      return self.shared.gather(part, self.axis_name, self.count)
    if part.cut is not None:
      self.gathered.append(part.array)
    return super().whole(part)


def _count_uses(jaxpr: Any) -> list[int]:
  """Returns how many operations and results take each input of a program."""
  flat = program.flatten(jaxpr)
  read = [*flat.outputs, *(v for step in flat.steps for v in step.ins)]
  values = collections.Counter(v for v in read if isinstance(v, program.Value))
  return [values[v] for v in flat.inputs]


def _check_params(
  own: list[PyTree], axis_name: AxisName, *, may_share: bool
) -> None:
  """Raises unless all workers hold the arrays that are differentiated."""
  # may_share: whether the workers may share them out.
  for path, leaf in core.named_leaves(own):
    if not (core.is_array(leaf) and core.is_inexact(leaf)):
      found = core.shape_string(leaf) if core.is_array(leaf) else repr(leaf)
      raise TypeError(
        f"Differentiated arguments must be floating-point arrays, got {found} "
        f"at {path!r}: split parameters from the rest before, by `nnx.split` "
        "or `eqx.partition(model, eqx.is_inexact_array)`."
      )
    if not may_share:
      _read_spec(path, leaf, axis_name)


def _read_spec(path: str, leaf: Any, axis_name: AxisName) -> P:
  """Returns a parameter's spec, if known; raises if workers share it out."""
  spec = getattr(_find_sharding(leaf), "spec", None) or P()
  if _model_axes.sharded_axes(spec) & set(core.axis_names(axis_name)):
    raise ValueError(
      f"Parameters must not be sharded over the workers' axis {axis_name!r}, "
      f"got {spec} at {path!r}: `exchange` would keep all of them on each "
      "worker. `jaxmotion.value_and_grad(..., specs=...)` trains shards, and "
      "so does `jaxmotion.fully_sharded`."
    )
  return spec


def _find_sharding(leaf: Any) -> Any:
  """Returns the sharding of an array or of a tracer's type, or None."""
  # Tracers do not know it, where the partitioner decides.
  typed = jax.typeof(leaf) if isinstance(leaf, jax.core.Tracer) else leaf
  return getattr(typed, "sharding", None)


def _check_loss(shapes: PyTree, has_aux: bool) -> None:
  """Raises unless a function returns a scalar loss."""
  if has_aux and not (isinstance(shapes, tuple) and len(shapes) == 2):
    raise TypeError(
      "`fun` must return a pair of the loss and other results with `has_aux`, "
      f"got {shapes!r:.200}."
    )
  loss = shapes[0] if has_aux else shapes
  if not hasattr(loss, "shape") or loss.shape or not core.is_inexact(loss):
    raise TypeError(f"`fun` must return a scalar loss, got {loss!r:.200}.")


def _find_dim(x: Any, count: int) -> int | None:
  """Returns the dimension along which an argument is taken to be split."""
  shape = jnp.shape(x)
  return 0 if shape and shape[0] % count == 0 and not core.is_key(x) else None


def run_anywhere(
  tx: optax.GradientTransformationExtraArgs,
  axis_name: AxisName,
  *,
  stays_own: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Lets a transformation that needs the workers' axis run without a map."""
  # Under an ordinary `jax.jit`, `init` and `update` bind the axis themselves.
  # stays_own: whether the updates are still each worker's own.

  def init(params: PyTree) -> PyTree:
    is_bound = core.axis_is_bound(axis_name)
    mesh = None if is_bound else _find_mesh(params, axis_name)
    if mesh is None:
      return tx.init(params)
    if isinstance(params, optax.LookaheadParams):
      raise TypeError(
        "`params` must be one tree, got the pair of `optax.lookahead`: put the "
        "exchange into the optimizer that `optax.lookahead` wraps."
      )
    specs = _find_specs(params, axis_name)
    shardings = _model_axes.Shardings(mesh, axis_name, specs)
    make = lambda params: _init_state.make_state(tx.init, params, shardings)
    return jax.jit(make)(params)

  def update(
    updates: PyTree, state: PyTree, params: PyTree | None = None, **args: Any
  ) -> tuple[PyTree, PyTree]:
    marked = [g for g in jax.tree.leaves(updates) if _is_unsummed(g)]
    if not marked:
      return tx.update(updates, state, params, **args)
    _check_marked(updates, axis_name)
    arrays = _model_axes.select_arrays(args)

    def update_own(
      rows: PyTree, state: PyTree, params: PyTree, arrays: PyTree
    ) -> tuple[PyTree, PyTree]:
      own = jax.tree.map(lambda row: row[0], rows)
      own, state = tx.update(own, state, params, **args | arrays)
      if stays_own:
        own = jax.tree.map(lambda a: a[None], own)
      return own, state

    mesh, specs = marked[0].mesh, core.state_specs(state, axis_name)
    in_specs = P(axis_name), specs, P(), P()
    mapped = jax.shard_map(
      update_own,
      out_specs=(P(axis_name) if stays_own else P(), specs),
      **_map_options(mesh, axis_name, in_specs),
    )
    rows = jax.tree.map(lambda g: g.value, updates)
    found, state = mapped(rows, state, params, arrays)
    if stays_own:
      mark = lambda rows: UnsummedGradient(rows, axis_name, mesh)
      found = jax.tree.map(mark, found)
    return found, state

  return optax.GradientTransformationExtraArgs(init, update)


def _find_specs(params: PyTree, axis_name: AxisName) -> PyTree | None:
  """Returns how parameters are sharded over axes of a model; None: nowhere."""
  specs = jax.tree.map_with_path(
    lambda path, leaf: _read_spec(core.leaf_path(path), leaf, axis_name), params
  )
  return specs if any(map(any, jax.tree.leaves(specs))) else None


def _is_unsummed(leaf: Any) -> bool:
  return isinstance(leaf, UnsummedGradient)


def _check_marked(updates: PyTree, axis_name: AxisName) -> None:
  """Raises unless all gradients are own ones of these workers."""
  for path, leaf in core.named_leaves(updates):
    if not _is_unsummed(leaf):
      raise ValueError(
        f"`updates/{path}` must be a worker's own gradient like the others, "
        f"got {core.shape_string(leaf)}, which is summed already: take all "
        "gradients by one `jaxmotion.value_and_grad`."
      )
    if leaf.axis_name != axis_name:
      raise ValueError(
        f"`updates/{path}` must be of workers along {axis_name!r}, got one of "
        f"{leaf.axis_name!r}: give `jaxmotion.value_and_grad` the `axis_name` "
        "of the exchange."
      )


def _map_options(
  mesh: Any, axis_name: AxisName, in_specs: Any
) -> dict[str, Any]:
  """Returns arguments of a `jax.shard_map` over the workers' axes alone."""
  # With `check_vma=False`, `jax.grad` in the map differentiates the sum of all
  # workers' losses, whatever they send to one another.
  return dict(
    mesh=mesh,
    in_specs=in_specs,
    axis_names=set(core.axis_names(axis_name)),
    check_vma=False,
  )


def _find_mesh(tree: PyTree, axis_name: AxisName) -> Any:
  """Returns the mesh of the context or of arrays that has an axis, or None."""
  wanted = set(core.axis_names(axis_name))
  meshes: list[Any] = [jax.sharding.get_abstract_mesh()]
  for leaf in jax.tree.leaves(tree):
    meshes.append(getattr(_find_sharding(leaf), "mesh", None))
  found = (m for m in meshes if m is not None)
  return next((m for m in found if wanted <= set(m.axis_names)), None)
