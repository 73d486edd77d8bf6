"""Generated programs: random trees of operations, and their results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxmotion import core
from jaxmotion.core import Array, PyTree

# 2048 elements: the fewest that a codec of residuals encodes.
SHAPE = (32, 64)
IMAGE = (4, 8, 16, 4)
_DIMS = ("NHWC", "HWIO", "NHWC")
_TABLE = np.linspace(-1, 1, 2048, dtype=np.float32).reshape(SHAPE)


class Env(NamedTuple):
  """Values that operations read besides their operands."""

  # Matrix "w", row "b", kernel "k", stack of three matrices "stack".
  params: PyTree
  ids: Array  # int32[32], rows; some of them are equal.
  key: Array  # Typed random key.
  # Integer results of the program, which operations append to.
  aux: list[Array]
  # Transformation of the functions that an operation "block" holds.
  wrap: Callable[[Callable[..., Any]], Callable[..., Any]]


Operation = Callable[[Env, Array, Array], Array]
Body = Callable[[Array], Array]
Container = Callable[[Env, Body, Array, Array], Array]


def _read(env: Env, name: str, like: Array) -> Array:
  return env.params[name].astype(like.dtype)


def _convolve(env: Env, x: Array, y: Array) -> Array:
  kernel = _read(env, "k", x)
  image = x.reshape(IMAGE)
  found = lax.conv_general_dilated(
    image, kernel, (1, 1), "SAME", None, None, _DIMS
  )
  return found.reshape(SHAPE)


def _pool(combine: Callable[..., Any], start: float, x: Array) -> Array:
  """Combines windows of 2 x 2 pixels and repeats the result for each pixel."""
  window = (1, 2, 2, 1)
  first = np.asarray(start, x.dtype)
  small = lax.reduce_window(
    x.reshape(IMAGE), first, combine, window, window, "VALID"
  )
  return jnp.repeat(jnp.repeat(small, 2, 1), 2, 2).reshape(SHAPE)


def _attend(env: Env, x: Array, y: Array) -> Array:
  q, k = (jnp.asarray(a, x.dtype).reshape(2, 16, 64) for a in (x, y))
  scores = jnp.einsum("btd,bsd->bts", q, k) / 64
  causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
  weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
  return jnp.einsum("bts,bsd->btd", weights, k).reshape(SHAPE)


def _normalize(env: Env, x: Array, y: Array) -> Array:
  x = x - x.mean(1, keepdims=True)
  return x * lax.rsqrt((x * x).mean(1, keepdims=True) + 0.1)


def _solve(env: Env, x: Array, y: Array) -> Array:
  matrix = 4 * jnp.eye(8) + jnp.tanh(x[:8, :8].astype(jnp.float32))
  found = jnp.linalg.solve(matrix, y[:8].astype(jnp.float32))
  return x + jnp.tile(found, (4, 1)).astype(x.dtype)


def _count(env: Env, x: Array, y: Array) -> Array:
  """Multiplies by a number that a while loop finds from integers."""
  start = env.ids[0] % 5

  def body(state: tuple[Array, Array]) -> tuple[Array, Array]:
    n, total = state
    return n + 1, total * 3 % 7

  _, total = lax.while_loop(lambda s: s[0] < 6, body, (start, jnp.int32(2)))
  env.aux.append(total)
  return x * total.astype(x.dtype) / 4


def _halve(env: Env, x: Array, y: Array) -> Array:
  """Adds what a while loop finds from floats that have no gradient."""
  held = lax.stop_gradient(jnp.abs(y)) + 0.1
  held = lax.while_loop(
    lambda a: jnp.max(a) > 1, lambda a: a / 2, jnp.asarray(held, x.dtype)
  )
  return x + held


def _scan_rows(env: Env, x: Array, y: Array) -> Array:
  w = _read(env, "b", x)

  def body(carry: Array, row: Array) -> tuple[Array, Array]:
    carry = jnp.tanh(carry * w + row)
    return carry, carry * row

  return lax.scan(body, y[0].astype(x.dtype), x)[1]


def _chunks(env: Env, x: Array, y: Array) -> Array:
  """Scans a nested scan over chunks, in reverse, with an integer counter."""

  def inner(carry: Array, row: Array) -> tuple[Array, Array]:
    return jax.nn.relu(carry - row), jnp.sin(carry)

  def outer(state: Any, chunk: Array) -> tuple[Any, Array]:
    carry, n = state
    carry, rows = lax.scan(inner, carry, chunk)
    return (carry, n + 1), rows * jnp.cos(n.astype(rows.dtype))

  begin = y[1].astype(x.dtype), jnp.int32(0)
  (_, count), rows = lax.scan(
    outer, begin, x.reshape(4, 8, 64), reverse=True, unroll=2
  )
  env.aux.append(count)
  return rows.reshape(SHAPE)


@jax.custom_vjp
def _reverse_gradient(x: Array) -> Array:
  return jnp.sin(x)


_reverse_gradient.defvjp(
  lambda x: (jnp.sin(x), (x > 0, jnp.cos(x))),
  lambda saved, ct: (jnp.where(saved[0], -ct, ct) * saved[1],),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _take_rows(count: int, x: Array, ids: Array) -> Array:
  return x[ids] * count


def _take_rows_backward(count: int, ids: Array, ct: Array) -> Any:
  zeros = np.zeros(ids.shape, jax.dtypes.float0)
  return jnp.zeros(SHAPE, ct.dtype).at[ids].add(ct * count), zeros


_take_rows.defvjp(
  lambda count, x, ids: (x[ids] * count, ids), _take_rows_backward
)


@jax.custom_jvp
def _safe_root(x: Array) -> Array:
  return jnp.sqrt(jnp.maximum(x, 0))


@_safe_root.defjvp
def _safe_root_jvp(primals: Any, tangents: Any) -> Any:
  (x,), (dx,) = primals, tangents
  root = _safe_root(x)
  return root, jnp.where(root > 0.1, dx / (2 * jnp.maximum(root, 0.1)), 0)


def _drop(env: Env, x: Array, y: Array) -> Array:
  first, second = jax.random.split(env.key)
  keep = jax.random.bernoulli(first, 0.7, SHAPE)
  noise = jax.random.normal(second, SHAPE, jnp.float32).astype(x.dtype)
  return jnp.where(keep, x + noise / 8, 0)


def _raw_key(env: Env, x: Array, y: Array) -> Array:
  raw = jax.random.key_data(env.key)
  key = jax.random.fold_in(jax.random.wrap_key_data(raw), env.ids[3])
  env.aux.append(raw)
  return x * jax.random.uniform(key, SHAPE, jnp.float32).astype(x.dtype)


def _integers(env: Env, x: Array, y: Array) -> Array:
  # Saturated values, such as a tanh of 1, are one rounding from an integer.
  codes = (x * 8 + 0.4).astype(jnp.int32) & 3
  env.aux.append(codes.sum(1))
  return y * codes.astype(y.dtype) / 2


def _largest(env: Env, x: Array, y: Array) -> Array:
  env.aux.append(jnp.argmax(x, 1))
  return x * jax.nn.one_hot(jnp.argmax(y, 1), 64, dtype=x.dtype)


def _top(env: Env, x: Array, y: Array) -> Array:
  values, indices = lax.top_k(x, 4)
  env.aux.append(indices)
  return y + values.sum(1, keepdims=True).astype(y.dtype) / 4


def _rows_of(env: Env, x: Array, y: Array) -> Array:
  def one(row: Array, index: Array) -> Array:
    return lax.cond(index % 2 == 0, jnp.sin, lambda r: r * index / 32, row)

  return jax.vmap(one)(x, env.ids).astype(x.dtype)


def _spectrum(env: Env, x: Array, y: Array) -> Array:
  waves = jnp.fft.rfft(x.astype(jnp.float32))
  return jnp.fft.irfft(waves * jnp.exp(1j * waves.real / 64)).astype(x.dtype)


def _table(env: Env, x: Array, y: Array) -> Array:
  return x * jnp.asarray(_TABLE, x.dtype) + _read(env, "b", x)[None]


OPERATIONS: dict[str, Operation] = {
  "tanh": lambda e, x, y: jnp.tanh(x),
  "sin": lambda e, x, y: jnp.sin(x),
  "relu": lambda e, x, y: jax.nn.relu(x),
  "gelu": lambda e, x, y: jax.nn.gelu(x),
  "silu": lambda e, x, y: jax.nn.silu(x),
  "softplus": lambda e, x, y: jax.nn.softplus(x),
  "leaky": lambda e, x, y: jax.nn.leaky_relu(x),
  "abs": lambda e, x, y: jnp.abs(x),
  "square": lambda e, x, y: jnp.square(jnp.tanh(x)),
  "log": lambda e, x, y: jnp.log1p(x * x),
  "clip": lambda e, x, y: jnp.clip(x, -0.7, 0.9),
  "floor": lambda e, x, y: x - jnp.floor(x + 0.4),
  "power": lambda e, x, y: jnp.tanh(x) ** 3,
  "add": lambda e, x, y: x + y,
  "multiply": lambda e, x, y: x * jnp.tanh(y),
  "divide": lambda e, x, y: x / (1 + y * y),
  "maximum": lambda e, x, y: jnp.maximum(x, y),
  "where": lambda e, x, y: jnp.where(x > 0.1, y, jnp.sin(x)),
  "hypot": lambda e, x, y: jnp.sqrt(x * x + y * y + 0.1),
  "matmul": lambda e, x, y: x @ _read(e, "w", x),
  "outer": lambda e, x, y: (x @ y.T.astype(x.dtype)) @ x / 256,
  "convolve": _convolve,
  "attend": _attend,
  "normalize": _normalize,
  "softmax": lambda e, x, y: 8 * jax.nn.softmax(x),
  "logsumexp": lambda e, x, y: y + jax.nn.logsumexp(x, 0, keepdims=True),
  "mean": lambda e, x, y: x - x.mean(0, keepdims=True),
  "variance": lambda e, x, y: x * (x.var(1, keepdims=True) + 1) / 2,
  "greatest": lambda e, x, y: y - x.max(1, keepdims=True) / 2,
  "product": lambda e, x, y: jnp.broadcast_to(
    jnp.prod(jnp.tanh(x[:4]) + 1, 0, keepdims=True), SHAPE
  ),
  "sort": lambda e, x, y: jnp.sort(x, 1),
  "top": _top,
  "cumsum": lambda e, x, y: jnp.cumsum(x, 0) / 8,
  "cummax": lambda e, x, y: lax.cummax(x, 1),
  "running": lambda e, x, y: lax.associative_scan(jnp.add, x / 8),
  "max_pool": lambda e, x, y: _pool(lax.max, -np.inf, x),
  "mean_pool": lambda e, x, y: _pool(lax.add, 0, x) / 4,
  "take": lambda e, x, y: x[e.ids],
  "take_argmax": lambda e, x, y: x[jnp.argmax(y, 1) % 32],
  "scatter_add": lambda e, x, y: x.at[e.ids].add(y.astype(x.dtype) / 2),
  "scatter_set": lambda e, x, y: x.at[jnp.arange(32)[::-2]].set(
    y[:16].astype(x.dtype)
  ),
  "segments": lambda e, x, y: jax.ops.segment_sum(x, e.ids % 8, 32) / 2 + y,
  "slice": lambda e, x, y: lax.dynamic_slice(
    jnp.concatenate([x, y.astype(x.dtype)]), (e.ids[0], 0), SHAPE
  ),
  "update": lambda e, x, y: lax.dynamic_update_slice(
    x, y[:8].astype(x.dtype), (e.ids[1], 0)
  ),
  "transpose": lambda e, x, y: x.T.reshape(SHAPE),
  "roll": lambda e, x, y: jnp.roll(x[::-1], 3, 1),
  "pad": lambda e, x, y: jnp.pad(x[1:-1, 2:], ((1, 1), (0, 2))),
  "split": lambda e, x, y: jnp.concatenate(jnp.split(x, 4, 1)[::-1], 1),
  "bfloat16": lambda e, x, y: x.astype(jnp.bfloat16),
  "float32": lambda e, x, y: x.astype(jnp.float32),
  "float16": lambda e, x, y: jnp.tanh(x).astype(jnp.float16),
  "stop": lambda e, x, y: x + lax.stop_gradient(y),
  "name": lambda e, x, y: checkpoint_name(jnp.sin(x), "hidden"),
  "drop": _drop,
  "raw_key": _raw_key,
  "integers": _integers,
  "largest": _largest,
  "count": _count,
  "halve": _halve,
  "scan_rows": _scan_rows,
  "chunks": _chunks,
  "rows_of": _rows_of,
  "map": lambda e, x, y: lax.map(jnp.sin, x, batch_size=16),
  "reverse_gradient": lambda e, x, y: _reverse_gradient(x),
  "take_rows": lambda e, x, y: _take_rows(2, x, e.ids),
  "safe_root": lambda e, x, y: _safe_root(x),
  "spectrum": _spectrum,
  "solve": _solve,
  "table": _table,
  "precision": lambda e, x, y: lax.reduce_precision(x, 8, 10),
  "zeros": lambda e, x, y: jnp.zeros_like(x) + y * 0,
}


def _loop(env: Env, body: Body, x: Array, y: Array) -> Array:
  def step(x: Array, w: Array) -> tuple[Array, Array]:
    z = body(x @ w.astype(x.dtype)).astype(x.dtype)
    return z, z.sum(1)

  z, sums = lax.scan(step, x, env.params["stack"])
  return z + sums.mean(0)[:, None] / 64


def _repeat(env: Env, body: Body, x: Array, y: Array) -> Array:
  return lax.fori_loop(0, 2, lambda i, x: body(x).astype(x.dtype), x)


def _branch(env: Env, body: Body, x: Array, y: Array) -> Array:
  return lax.cond(
    y[0, 0] > 0, lambda x: body(x).astype(x.dtype), lambda x: x * 2, x
  )


def _switch(env: Env, body: Body, x: Array, y: Array) -> Array:
  branches = [jnp.sin, lambda x: body(x).astype(x.dtype), lambda x: -x]
  return lax.switch(env.ids[2] % 3, branches, x)


def _checkpoint(env: Env, body: Body, x: Array, y: Array) -> Array:
  policy = jax.checkpoint_policies.dots_saveable
  return jax.checkpoint(jax.checkpoint(body), policy=policy)(x)


# Operations that hold a program of their own.
CONTAINERS: dict[str, Container] = {
  "loop": _loop,
  "repeat": _repeat,
  "branch": _branch,
  "switch": _switch,
  "jit": lambda e, body, x, y: jax.jit(body)(x),
  "checkpoint": _checkpoint,
  "block": lambda e, body, x, y: e.wrap(body)(x),
  "batch": lambda e, body, x, y: jax.vmap(body)(jnp.stack([x, -x])).sum(0) / 2,
}


_NARROW = ("bfloat16", "float16")


class Node(NamedTuple):
  """One operation of a program."""

  name: str  # Its name in `OPERATIONS` or `CONTAINERS`.
  left: int  # Position of the first operand among the values so far.
  right: int  # Position of the second operand.
  body: tuple[Node, ...] = ()  # Operations inside of a container.

  def __repr__(self) -> str:
    inner = f", {list(self.body)}" if self.body else ""
    return f"{self.name}({self.left}, {self.right}{inner})"

  def is_narrow(self) -> bool:
    """Says whether the operation, or one inside of it, narrows its floats."""
    return self.name in _NARROW or any(node.is_narrow() for node in self.body)


def make_nodes(
  rng: np.random.Generator, count: int, depth: int = 1
) -> tuple[Node, ...]:
  """Returns random operations as nodes of a program."""
  nodes = []
  for i in range(count):
    # The last value is read more often than others: programs are deep.
    left = int(rng.integers(-1, i + 1)) if rng.random() < 0.4 else i
    right = int(rng.integers(0, i + 1))
    if depth and rng.random() < 0.25:
      name = str(rng.choice(list(CONTAINERS)))
      body = make_nodes(rng, int(rng.integers(1, 4)), depth - 1)
      nodes.append(Node(name, max(left, 0), right, body))
    else:
      name = str(rng.choice(list(OPERATIONS)))
      nodes.append(Node(name, max(left, 0), right))
  return tuple(nodes)


def run_nodes(nodes: Sequence[Node], env: Env, x: Array) -> Array:
  """Returns the value of the last operation."""
  values = [x]
  for node in nodes:
    left, right = values[node.left], values[node.right]
    if node.body:
      # What is appended inside of a loop or a branch must not leave it.
      inner = env._replace(aux=[])

      def body(x: Array, node: Node = node, inner: Env = inner) -> Array:
        return run_nodes(node.body, inner, x)

      values.append(CONTAINERS[node.name](env, body, left, right))
    else:
      values.append(OPERATIONS[node.name](env, left, right))
  return values[-1]


def make_params(rng: np.random.Generator) -> dict[str, Array]:
  """Returns parameters that operations read, and one that none does."""
  shapes = {
    "w": (64, 64),
    "b": (64,),
    "k": (3, 3, 4, 4),
    "stack": (3, 64, 64),
    "unused": (3,),
  }
  scale = {"w": 0.1, "b": 1.0, "k": 0.15, "stack": 0.1, "unused": 1.0}
  return {
    name: jnp.asarray(rng.normal(0, scale[name], shape), jnp.float32)
    for name, shape in shapes.items()
  }


def make_data(rng: np.random.Generator) -> tuple[Array, Array, Array]:
  """Returns a matrix, rows of it, and a random key."""
  x = jnp.asarray(rng.normal(0, 1, SHAPE), jnp.float32)
  ids = jnp.asarray(rng.integers(0, 32, 32), jnp.int32)
  return x, ids, jax.random.key(int(rng.integers(2**31)))


def make_loss(
  nodes: Sequence[Node], wrap: Callable[[Any], Any]
) -> Callable[..., tuple[Array, PyTree]]:
  """Returns a function that ends in a scalar, with further results."""

  def loss(
    params: PyTree, x: Array, ids: Array, key: Array, nothing: None
  ) -> tuple[Array, PyTree]:
    del nothing
    env = Env(params, ids, key, [], wrap)
    y = run_nodes(nodes, env, x).astype(jnp.float32)
    others = {"integers": env.aux, "twice": (y, y), "x": x, "one": 1}
    return jnp.mean(jnp.square(y)), others

  return loss


# Code that runs for milliseconds is not worth seconds of optimization.
_OPTIONS: Any = {"xla_backend_optimization_level": 0}


class Comparison(NamedTuple):
  """Results of a function of plain JAX and of ours."""

  law: str  # What must be equal.
  case: str  # The program and the options.
  expected: PyTree  # Tree of the plain function.
  found: PyTree  # Tree of ours.
  # Largest relative distance of a leaf; None asks only for finite floats.
  tolerance: float | None


def describe_difference(comparison: Comparison) -> str:
  """Returns where two trees differ, or nothing."""
  _, _, expected, found, tolerance = comparison
  if not core.same_structure(expected, found):
    return f"{jax.tree.structure(found)}, not {jax.tree.structure(expected)}"
  lines = []
  for (path, a), b in zip(
    jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True
  ):
    if problem := _compare_leaves(a, b, tolerance):
      lines.append(f"{jax.tree_util.keystr(path)}: {problem}")
  return "\n".join(lines)


def _compare_leaves(a: Any, b: Any, tolerance: float | None) -> str:
  a, b = jnp.asarray(a), jnp.asarray(b)
  if (a.shape, a.dtype) != (b.shape, b.dtype):
    return f"{b.dtype}{b.shape}, not {a.dtype}{a.shape}"
  if not jnp.issubdtype(a.dtype, jnp.floating):
    share = float(np.mean(np.asarray(a) != np.asarray(b)))
    # An argmax may differ where two elements are equal but for rounding.
    return f"{share:.3g} of the integers differ" if share > 0.05 else ""
  x, y = (np.asarray(v, np.float64).ravel() for v in (a, b))
  if not np.isfinite(x).all():
    return ""
  if not np.isfinite(y).all():
    return f"{np.sum(~np.isfinite(y))} elements are not finite"
  scale = np.linalg.norm(x)
  distance = np.linalg.norm(x - y) / scale if scale > 1e-20 else 0.0
  if tolerance is not None and distance > tolerance:
    return f"relative distance {distance:.3g}, at most {tolerance:g} allowed"
  return ""


def compile_lightly(fn: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a jitted function that is compiled fast."""
  return jax.jit(fn, compiler_options=_OPTIONS)


def rounding_tolerance(nodes: Sequence[Node]) -> float:
  """Returns the relative distance that rounding in another order explains."""
  return 0.2 if any(n.is_narrow() for n in nodes) else 2e-4
