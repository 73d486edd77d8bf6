"""Generated updates: optimizers with less memory, against plain optax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.fuzz import program_nodes
from experiments.fuzz.program_nodes import Comparison, Env, Node
from jaxmotion import codecs, memory
from jaxmotion.core import PyTree

# Their updates change little where a gradient changes little.
_OPTIMIZERS = {
  "sgd": optax.sgd(0.1),
  "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
  "adam": optax.adam(1e-2, eps=0.1),
  "adamw": optax.adamw(1e-2, eps=0.1, weight_decay=0.1),
  "rmsprop": optax.chain(optax.clip(0.5), optax.rmsprop(1e-2, eps=0.1)),
}
EXACT_CODECS = (
  None,
  memory.offload(),
  memory.recompute(),
  codecs.identity(),
  codecs.zero_value(capacity=0.7),
  codecs.zero_value(capacity=0.01),
)


def _pick(rng: np.random.Generator, choices: Any) -> Any:
  return list(choices)[rng.integers(len(choices))]


def _block(nodes: tuple[Node, ...], ids: Any, key: Any) -> Callable[..., Any]:
  def block(params: PyTree, x: Any) -> Any:
    env = Env(params, ids, key, [], lambda fn: fn)
    return program_nodes.run_nodes(nodes, env, x).astype(x.dtype)

  return block


def _mean_square(x: Any, y: Any) -> Any:
  return jnp.mean(jnp.square(x - y))


def check_optimizer_in_backward(
  rng: np.random.Generator, data: np.random.Generator
) -> Iterator[Comparison]:
  """Compares an update within the backward pass to a plain one."""
  x, ids, key = program_nodes.make_data(data)
  sizes = [int(rng.choice([1, 2, 3])) for _ in range(int(rng.integers(1, 3)))]
  programs = [
    program_nodes.make_nodes(rng, int(rng.integers(2, 5)), 0) for _ in sizes
  ]
  blocks = [_block(nodes, ids, key) for nodes in programs]
  params: list[PyTree] = []
  for size in sizes:
    rows = [program_nodes.make_params(data) for _ in range(size)]
    stack = jax.tree.map(lambda *a: jnp.stack(a), *rows)
    params.append(rows[0] if size == 1 else stack)
  name = _pick(rng, _OPTIMIZERS)
  tx = _OPTIMIZERS[name]
  codec = EXACT_CODECS[rng.integers(len(EXACT_CODECS))]
  segment = (None, 1, 2)[rng.integers(3)]
  model = memory.OptimizerInBackward(
    list(zip(blocks, sizes, strict=True)),
    _mean_square,
    tx,
    codec=codec,
    segment=segment,
  )

  def loss(params: list[PyTree], x: Any, y: Any) -> Any:
    for block, own, size in zip(blocks, params, sizes, strict=True):
      for i in range(size):
        row = own if size == 1 else jax.tree.map(lambda a, i=i: a[i], own)
        x = block(row, x)
    return _mean_square(x, y)

  def plain(params: list[PyTree], state: PyTree, x: Any, y: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x, y)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), value

  y = program_nodes.make_data(data)[0]
  expected, value = program_nodes.compile_lightly(plain)(
    params, tx.init(params), x, y
  )
  found, _, our_value = program_nodes.compile_lightly(model.step)(
    params, model.init(params), x, y
  )
  # Compared are the updates: parameters would hide their errors.
  expected, found = (
    jax.tree.map(jnp.subtract, tree, params) for tree in (expected, found)
  )
  nodes = tuple(node for program in programs for node in program)
  text = f"{programs} repeats={sizes} {codec=} {segment=} {name}"
  tolerance = program_nodes.rounding_tolerance(nodes)
  yield Comparison(
    "loss in backward is exact", text, value, our_value, tolerance
  )
  yield Comparison(
    "update in backward is that of optax", text, expected, found, tolerance
  )


def check_compressed_state(
  rng: np.random.Generator, data: np.random.Generator
) -> Iterator[Comparison]:
  """Compares updates from encoded state to those from plain state."""
  shapes = [(64, 64), (4096,), (3, 5), (7, 11, 13), (), (1, 4096), (0,)]
  count = int(rng.integers(1, 5))
  params: PyTree = {}
  for i in range(count):
    shape = shapes[rng.integers(len(shapes))]
    dtype = ("float32", "float32", "bfloat16")[rng.integers(3)]
    params[f"p{i}"] = jnp.asarray(data.normal(0, 1, shape), dtype)
  if rng.random() < 0.3:
    params = [
      params,
      {"mu": jnp.asarray(data.normal(0, 1, (64, 64)), "float32")},
    ]
  make = _STATES[name := _pick(rng, _STATES)]
  exact = rng.random() < 0.6
  chosen = codecs.identity() if exact else None
  options: dict[str, Any] = {
    "min_leaf_size": int(_pick(rng, (0, 1, 16, 4096))),
    "memory_kind": _pick(rng, (None, "pinned_host")),
  }
  if exact:
    options |= {"first": chosen, "second": _pick(rng, (chosen, None))}
  plain, ours = make(), memory.compress_state(make(), **options)
  grads = [
    jax.tree.map(
      lambda a: jnp.asarray(data.normal(0, 1, a.shape), a.dtype), params
    )
    for _ in range(2)
  ]

  def run(tx: Any) -> Callable[..., Any]:
    def steps(params: PyTree, grads: list[PyTree]) -> Any:
      state = tx.init(params)
      updates = []
      for g in grads:
        u, state = tx.update(g, state, params)
        updates.append(u)
      return updates, state

    return program_nodes.compile_lightly(steps)

  shape_text = jax.tree.map(lambda a: f"{a.dtype}{a.shape}", params)
  text = f"{name} {shape_text} {options}"
  found, state = run(ours)(params, grads)
  expected, plain_state = run(plain)(params, grads)
  narrow = any(a.dtype == jnp.bfloat16 for a in jax.tree.leaves(params))
  tolerance = (0.02 if narrow else 1e-5) if exact else None
  yield Comparison(
    "updates from encoded state are those of optax",
    text,
    expected,
    found,
    tolerance,
  )
  yield Comparison(
    "decoded state is exact",
    text,
    plain_state,
    memory.decompress_state(state).inner,
    tolerance,
  )


_STATES: dict[str, Callable[[], optax.GradientTransformation]] = {
  "adam": lambda: optax.adam(1e-2, eps=0.1),
  "momentum": lambda: optax.sgd(0.1, momentum=0.9),
  "ema": lambda: optax.chain(optax.ema(0.9), optax.scale(-0.1)),
  "chain": lambda: optax.chain(
    optax.clip_by_global_norm(1.0), optax.scale_by_adam(eps=0.1)
  ),
  "schedule": lambda: optax.adam(optax.linear_schedule(0.1, 0, 9), eps=0.1),
  "injected": lambda: optax.inject_hyperparams(optax.adam)(
    learning_rate=0.1, eps=0.1
  ),
  "finite": lambda: optax.apply_if_finite(optax.adam(0.1, eps=0.1), 2),
  "every_two": lambda: optax.MultiSteps(
    optax.adam(0.1, eps=0.1), 2
  ).gradient_transformation(),
  "masked": lambda: optax.masked(
    optax.sgd(0.1, momentum=0.9),
    lambda params: jax.tree.map(lambda a: a.ndim > 1, params),
  ),
  "amsgrad": lambda: optax.amsgrad(1e-2, eps=0.1),
}


def check_host_resident(
  rng: np.random.Generator, data: np.random.Generator
) -> Iterator[Comparison]:
  """Compares an update of weights on the host to a plain one."""
  x, ids, key = program_nodes.make_data(data)
  count = int(rng.integers(1, 3))
  programs = [
    program_nodes.make_nodes(rng, int(rng.integers(1, 4)), 0)
    for _ in range(count)
  ]
  names = [f"stage{i}" for i in range(count)]
  params = {name: program_nodes.make_params(data) for name in names}

  def make_stage(i: int) -> Callable[..., Any]:
    def stage(own: PyTree, x: Any, batch: PyTree) -> Any:
      x = batch["x"] if x is None else x
      y = _block(programs[i], batch["ids"], batch["key"])(own, x)
      return _mean_square(y, batch["y"]) if i + 1 == count else y

    return stage

  stages = [(name, make_stage(i)) for i, name in enumerate(names)]
  tx = _OPTIMIZERS[name := _pick(rng, _OPTIMIZERS)]
  exact = rng.random() < 0.6
  options: dict[str, Any] = {
    "send_difference": rng.random() < 0.4,
    "update": _pick(rng, ("once", "per_stage")),
    "min_leaf_size": int(_pick(rng, (0, 1024))),
  }
  options["stream_weights"] = (
    not options["send_difference"] and rng.random() < 0.5
  )
  if exact:
    options |= {"weights": codecs.identity(), "grads": codecs.identity()}
  model = memory.HostResident(stages, tx, **options)
  batch = {
    "x": x,
    "ids": ids,
    "key": key,
    "y": program_nodes.make_data(data)[0],
  }

  def loss(params: PyTree, batch: PyTree) -> Any:
    x = None
    for stage_name, fn in stages:
      x = fn(params[stage_name], x, batch)
    return x

  @program_nodes.compile_lightly
  def plain(params: PyTree, batch: PyTree) -> Any:
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, _ = tx.update(grads, tx.init(params), params)
    return optax.apply_updates(params, updates), value

  expected, value = plain(params, batch)
  state, our_value = model.step(model.init(params), batch)
  expected, found = (
    jax.tree.map(jnp.subtract, tree, params)
    for tree in (expected, state.params)
  )
  nodes = tuple(node for program in programs for node in program)
  text = f"{programs} {name} {options}"
  tolerance = program_nodes.rounding_tolerance(nodes) if exact else None
  yield Comparison(
    "loss from the host is exact", text, value, our_value, tolerance
  )
  yield Comparison(
    "update on the host is that of optax", text, expected, found, tolerance
  )
