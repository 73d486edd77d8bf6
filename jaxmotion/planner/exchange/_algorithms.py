"""Prices every exchange of the library for one problem, beside its plan."""

import collections
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from jaxmotion import codecs, core, perfmodel, presets, transforms, wire
from jaxmotion.core import PyTree
from jaxmotion.perfmodel.extend import (
  decode_seconds,
  encode_seconds,
  sum_axis_bytes,
)
from jaxmotion.planner import _text
from jaxmotion.planner.exchange import _problem
from jaxmotion.transforms import extend

# Local updates exchange as often as adds no more than this share of a step.
_ADDED_SHARE = 0.05
_PERIODS = (2, 4, 8, 16, 32, 64)
# Bytes depend on shapes alone, not on rates.
_ARGUMENTS = {"learning_rate": 1e-3, "tx": optax.sgd(0.1)}
# Options of an exchange, and what an update of parameters sends.
_Moves = tuple[Any, wire.Ledger]


class AlgorithmChoice(NamedTuple):
  """One algorithm with its predicted step, or why it is not offered.

  Attributes:
    name: expression that makes it.
    step_s: predicted seconds of a step, on average; None if not offered.
    axis_bytes: bytes that a worker sends in a step by axis, on average, or {}.
    note: what it changes about training, or why it is not offered.
  """

  name: str
  step_s: float | None
  axis_bytes: Mapping[str, float]
  note: str

  @property
  def is_offered(self) -> bool:
    """Whether the training can use it, as far as the planner knows."""
    return self.step_s is not None


class AlgorithmTable(tuple[AlgorithmChoice, ...]):
  """Algorithms, the fastest step first; `str` is a table."""

  def __str__(self) -> str:
    axes = self[0].axis_bytes if self else {}
    places = _text.name_places(axes, "wire a step")
    rows = [("algorithm", "step", *places, "note")]
    for name, step_s, axis_bytes, note in self:
      step = "not offered" if step_s is None else _text.format_seconds(step_s)
      sent = [_text.format_bytes(n) for n in axis_bytes.values()]
      rows.append((name, step, *(sent or [""] * len(axes)), note))
    return core.text_table(rows)


def weigh_algorithms(
  problem: _problem.ExchangeProblem,
  step: perfmodel.StepPrediction,
  uncompressed: perfmodel.StepPrediction,
) -> AlgorithmTable:
  """Predicts the steps of all algorithms of the library for one problem."""
  axis = problem.mesh_axis
  coding_s = step.encode_s + step.decode_s
  pricing = _Pricing(problem, uncompressed)
  choices = [
    _offer(
      problem,
      f"exchange({axis!r}, plan.codec)",
      step.total_s,
      step.axis_bytes,
      step.memory_bytes,
      "The plan: an exchange in every step.",
    ),
    _offer(
      problem,
      "delayed(...)",
      max(_own_seconds(step) + coding_s, step.link_s + coding_s),
      step.axis_bytes,
      step.memory_bytes + core.tree_bytes(problem.step_cost.params),
      "The plan's exchange, of gradients that are one step old.",
    ),
    weigh_period(problem, step),
    *pricing.weigh_presets(),
    *pricing.weigh_sharded(),
  ]
  choices.sort(key=lambda c: float("inf") if c.step_s is None else c.step_s)
  return AlgorithmTable(choices)


def weigh_period(
  problem: _problem.ExchangeProblem,
  step: perfmodel.StepPrediction,
  name: str = "local_updates(..., every={every})",
  note: str = "Workers train apart for {every} steps: compare the loss.",
  *,
  fragments: int = 1,
) -> AlgorithmChoice:
  """Predicts local updates with an exchange every few steps."""
  # fragments: parts of the parameters that are exchanged in turn. A period is a
  # multiple of their number.
  base_s = _own_seconds(step)
  exchange_s = step.encode_s + step.link_s + step.decode_s
  periods = [n for n in _PERIODS if n % fragments == 0]
  enough = [n for n in periods if exchange_s <= n * _ADDED_SHARE * base_s]
  every = enough[0] if enough else periods[-1]
  return _offer(
    problem,
    name.format(every=every),
    base_s + exchange_s / every,
    {axis: n / every for axis, n in step.axis_bytes.items()},
    # The parameters after the last exchange, and the outer momentum.
    step.memory_bytes + 2 * core.tree_bytes(problem.step_cost.params),
    note.format(every=every),
  )


def _own_seconds(step: perfmodel.StepPrediction) -> float:
  """Returns the seconds of a step without any exchange."""
  return step.compute_s + step.update_s + step.call_s


def _offer(
  problem: _problem.ExchangeProblem,
  name: str,
  step_s: float,
  axis_bytes: Mapping[str, float],
  memory_bytes: float,
  note: str,
) -> AlgorithmChoice:
  """Returns an algorithm, or why it does not fit the device."""
  if refusal := problem.explain_memory(memory_bytes):
    return _refuse(name, f"It {refusal}.")
  return AlgorithmChoice(name, step_s, axis_bytes, note)


def _refuse(name: str, note: str) -> AlgorithmChoice:
  """Returns an algorithm that is not offered, with the reason."""
  return AlgorithmChoice(name, None, {}, note)


class _Pricing:
  """Prices transformations by the exchanges in their states."""

  def __init__(
    self,
    problem: _problem.ExchangeProblem,
    uncompressed: perfmodel.StepPrediction,
  ):
    self.problem, self.uncompressed = problem, uncompressed
    # The workers' axes, on no devices.
    axes = core.axis_names(problem.mesh_axis)
    sizes = tuple(problem.platform.axis(axis).workers for axis in axes)
    kinds = (AxisType.Auto,) * len(axes)
    self.mesh = AbstractMesh(sizes, axes, axis_types=kinds)

  def weigh_presets(self) -> Iterator[AlgorithmChoice]:
    """Yields all presets, by the facts that each of them carries."""
    axis = self.problem.mesh_axis
    for preset in vars(presets).values():
      facts = getattr(preset, "facts", None)
      if facts is None:
        continue
      parameters = inspect.signature(preset).parameters
      defaults = {name: p.default for name, p in parameters.items()}
      is_scheme = "axis_name" != next(iter(defaults))
      name = f"presets.{preset.__name__}"
      shown = f"{name}(...)" if is_scheme else f"{name}({axis!r}, ...)"
      breaks = {a: self._find_break(a) for a in facts.assumes}
      if broken := [facts.assumes[a] + b for a, b in breaks.items() if b]:
        yield _refuse(shown, broken[0])
      elif is_scheme:
        yield weigh_period(
          self.problem,
          self.problem.predict_step(defaults["codec"], None),
          f"{name}(..., every={{every}})",
          facts.note,
          fragments=defaults.get("fragments", 1),
        )
      else:
        given = {k: v for k, v in _ARGUMENTS.items() if k in defaults}
        make = functools.partial(preset, axis, **given)
        if "elementwise" in facts.assumes:
          moves = self._trace_distinct(make())
          yield self._price_division(shown, *moves, facts.note)
        else:
          yield self._weigh_exchange(shown, make, facts)

  def weigh_sharded(self) -> Iterator[AlgorithmChoice]:
    """Yields what workers divide at full precision: an optimizer, or all."""
    name, full_name = (
      f"sharded({self.problem.mesh_axis!r}, ...)",
      "fully_sharded(...)",
    )
    if isinstance(self._sharded, Exception):
      note = f"It assumes an optimizer of single elements: {self._sharded}"
      yield from (_refuse(name, note), _refuse(full_name, note))
      return
    options, ledger = self._sharded
    note = "Each worker keeps a part of the optimizer's state."
    yield self._price_division(name, options, ledger, note)
    # The backward pass gathers the weights again and computes the blocks again,
    # which is a third of the products of both passes.
    gathers = (move for move in ledger.moves if move.op == "all_gather")
    choice = self._price_division(
      full_name,
      options,
      wire.Ledger((*ledger.moves, *gathers)),
      "Each worker keeps a part of all. The loss has to gather its blocks by "
      "`transforms.gather_block`.",
      # Parameters and gradients.
      2 * core.tree_bytes(self.problem.step_cost.params),
    )
    if choice.step_s is not None:
      again_s = self.uncompressed.compute_s / 3
      choice = choice._replace(step_s=choice.step_s + again_s)
    yield choice

  def _find_break(self, assumption: str) -> str:
    """Says what breaks an assumption that presets name, or nothing."""
    step_cost = self.problem.step_cost
    params, uses = step_cost.params, step_cost.uses
    leaves = core.named_leaves(params)
    match assumption:
      case "no_moments":
        # Moments of 8 bits are a quarter of the parameters; counters are
        # nothing.
        if step_cost.state_bytes >= core.tree_bytes(params) / 8:
          return ", but `optimizer` keeps moments."
      case "no_lookups":
        if uses.looked_up:
          return f", but the loss only looks up rows of `{uses.looked_up[0]}`."
      case "no_stacks":
        deep = {path for path, a in leaves if a.ndim > 2}
        for path in filter(deep.__contains__, uses.stacked):
          return f", but the loss takes `{path}` apart, a stack of several."
      case "matrices":
        if not any(a.ndim == 2 and min(a.shape) > 1 for _, a in leaves):
          return ", and `params` has none."
      case "elementwise":
        if isinstance(self._sharded, Exception):
          return f": {self._sharded}"
      case "gathered_blocks":
        return "."  # No loss says whether it gathers them.
      case _:
        raise ValueError(f"no such assumption: {assumption}")
    return ""

  def _weigh_exchange(
    self,
    name: str,
    make: Callable[[], optax.GradientTransformation],
    facts: Any,
  ) -> AlgorithmChoice:
    """Prices a transformation that exchanges whenever it is called."""
    axes = self.mesh.axis_names
    try:
      leaves = self.problem.distinct_leaves
      state = extend.trace_state(make(), leaves, self.mesh, axes)
      options = [x.made_for for x in extend.find_exchanges(state)]
      steps = [
        self.problem.predict_step(codec, own.method)
        for own in options
        for codec in own.codecs
      ]
    except (TypeError, ValueError) as error:
      return _refuse(name, f"It refuses: {error}")
    # Phases that send more are a warm-up.
    step = min(steps, key=lambda s: s.wire_bytes)
    if step.wire_bytes >= self.uncompressed.wire_bytes:
      note = "It sends no fewer bytes: the tensors are small, or no matrices."
      return _refuse(name, note)
    if facts.is_outer:
      name = f"local_updates(..., {name}, every={{every}})"
      return weigh_period(self.problem, step, name, facts.note)
    sent, needed = step.axis_bytes, step.memory_bytes
    return _offer(self.problem, name, step.total_s, sent, needed, facts.note)

  @functools.cached_property
  def _sharded(self) -> _Moves | Exception:
    """Moves of the problem's optimizer if divided, or why it is not."""
    optimizer = self.problem.step_cost.optimizer
    try:
      tx = transforms.sharded(self.problem.mesh_axis, optimizer)
      try:
        return self._trace_distinct(tx)
      except (KeyError, TypeError, ValueError):
        # One that labels parameters takes the whole tree alone.
        return self._trace_moves(tx, self.problem.step_cost.params)
    except (TypeError, ValueError) as error:
      return error

  def _trace_distinct(self, tx: optax.GradientTransformation) -> _Moves:
    """Returns the moves of all parameters from those of one of each shape."""
    # Equal layers are traced once, because tracing is slow.
    leaves = jax.tree.leaves(self.problem.step_cost.params)
    counts = collections.Counter((a.shape, a.dtype) for a in leaves)
    sent: collections.Counter[wire.Move] = collections.Counter()
    for leaf in self.problem.distinct_leaves.values():
      options, ledger = self._trace_moves(tx, leaf)
      for move in ledger.moves:
        nbytes = move.payload_bytes * move.count
        kind = move._replace(payload_bytes=0, count=1)
        sent[kind] += nbytes * counts[leaf.shape, leaf.dtype]
    moves = [kind._replace(payload_bytes=n) for kind, n in sent.items()]
    return options, wire.Ledger(tuple(moves))

  def _trace_moves(
    self, tx: optax.GradientTransformation, params: PyTree
  ) -> _Moves:
    """Returns what an update of parameters sends."""
    mesh, axes = self.mesh, self.mesh.axis_names
    state = extend.trace_state(tx, params, mesh, axes)
    specs = core.state_specs(state, axes)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> PyTree:
      own = jax.tree.map(lambda a: a[0], grads)
      return tx.update(own, state, params)

    run = jax.shard_map(
      update, mesh=mesh, in_specs=(P(axes), specs, P()), out_specs=(P(), specs)
    )
    grads = jax.tree.map(
      lambda a: jax.ShapeDtypeStruct((mesh.size, *a.shape), a.dtype), params
    )
    (exchange,) = extend.find_exchanges(state)
    return exchange.made_for, wire.step_bytes(run, grads, state, params)

  def _price_division(
    self,
    name: str,
    options: Any,
    ledger: wire.Ledger,
    note: str,
    divided_bytes: int = 0,
  ) -> AlgorithmChoice:
    """Prices an optimizer whose update and state workers divide."""
    # divided_bytes: memory that they divide beside the state.
    problem, uncompressed = self.problem, self.uncompressed
    device = problem.platform.device
    hosts, devices = problem.workers, problem.devices or 1
    size = sum(a.size for a in jax.tree.leaves(problem.step_cost.params))
    part = -(-size // (hosts * devices))
    gradients = options.gradient_codec
    weights = options.weight_codec or codecs.identity()
    coding_s = encode_seconds(gradients, size // devices, device)
    coding_s += decode_seconds(gradients, part, hosts, device)
    coding_s += encode_seconds(weights, part, device)
    coding_s += decode_seconds(weights, size, 1, device)
    link_s = perfmodel.ledger_seconds(ledger, problem.platform)
    saved = 1 - 1 / (hosts * devices)
    base_s = _own_seconds(uncompressed) - saved * uncompressed.update_s
    divided_bytes += problem.step_cost.state_bytes
    needed = uncompressed.memory_bytes - saved * divided_bytes
    step_s = base_s + coding_s + link_s
    sent = sum_axis_bytes(ledger.moves, self.mesh.axis_names)
    return _offer(problem, name, step_s, sent, needed, note)
