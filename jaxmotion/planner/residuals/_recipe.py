"""Ways to save the residuals of a function, their costs not yet known.

A way changes nothing, is `jax.checkpoint` by a policy, or is a cut by
`memory.compress_residuals`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from jaxmotion import core, perfmodel, program
from jaxmotion.memory import residuals

Rules = tuple[tuple[str, residuals.Action], ...]
Policy = Callable[..., Any]
_POLICIES = jax.checkpoint_policies
# "" is none: nothing is saved.
_PLAIN_POLICIES = (
  "",
  "everything_saveable",
  "dots_saveable",
  "dots_with_no_batch_dims_saveable",
)
# Names given by `checkpoint_name` that are tried alone; the first ones.
_MOST_NAMES = 8


class Recipe(NamedTuple):
  """A way to save the residuals of a function.

  Attributes:
    name: words for it, which no other way has.
    kind: "plain" changes nothing, "stock" is `jax.checkpoint`, and "cut" is
      `memory.compress_residuals`.
    rules: rules of a cut.
    memory_budget: share of a cut.
    policy: policy of `jax.checkpoint`.
    in_loops: whether `jax.checkpoint` wraps the bodies of loops, rather than
      the whole function.
    is_on_host: whether the policy saves arrays on the host.
  """

  name: str
  kind: str
  rules: Rules = ()
  memory_budget: float | None = None
  policy: Policy | None = None
  in_loops: bool = False
  is_on_host: bool = False

  @property
  def has_offload(self) -> bool:
    """Whether a rule of a cut sends residuals to the host."""
    return any(isinstance(a, residuals.offload) for _, a in self.rules)

  def wrap(
    self, fn: Callable[..., Any], count: int, device: perfmodel.Device
  ) -> Callable[..., Any]:
    """Returns the function that saves its residuals this way."""
    if self.kind == "plain":
      return fn
    if self.kind == "cut":
      return residuals.compress_residuals(
        fn, **self._cut_options(count, device)
      )
    if self.in_loops:
      return checkpoint_loops(fn, self.policy)
    return jax.checkpoint(fn, policy=self.policy)

  def list_residuals(
    self, fn: Callable[..., Any], args: Sequence[Any], device: perfmodel.Device
  ) -> list[residuals.Residual]:
    """Returns the residuals that a cut saves; [] for other kinds."""
    if self.kind != "cut":
      return []
    options = self._cut_options(len(args), device)
    return residuals.residuals_of(fn, *args, **options)

  def _cut_options(
    self, count: int, device: perfmodel.Device
  ) -> dict[str, Any]:
    """Returns the options of `compress_residuals` for this recipe."""
    return {
      "codec": self.rules or None,
      "params": tuple(range(count)),
      "memory_budget": self.memory_budget,
      "device": device,
    }


PLAIN = Recipe("plain", "plain")


def make_cut(
  memory_budget: float | None = None, rules: Rules = (), words: str = ""
) -> Recipe:
  """Makes the recipe of a cut, whose rules have these words."""
  parts = [words] if words else []
  if memory_budget is not None:
    parts.append(f"memory_budget={memory_budget:g}")
  name = f"compress_residuals({', '.join(parts)})"
  return Recipe(name, "cut", rules, memory_budget)


def checkpoint_loops(
  fn: Callable[..., Any], policy: Policy | None
) -> Callable[..., Any]:
  """Returns a function whose scans run their bodies under `jax.checkpoint`."""

  @functools.wraps(fn)
  def run_checkpointed(*args: Any) -> Any:
    """Runs the traced function with each scan under `jax.checkpoint`."""
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    flat = program.flatten(closed)
    env = dict(flat.constants)
    env.update(zip(flat.inputs, jax.tree.leaves(args), strict=True))
    steps = [
      _CheckpointedScan(s.eqn, s.ins, s.outs, s.sizes, s.scope, policy)
      if s.name == "scan"
      else s
      for s in flat.steps
    ]
    program.evaluate(steps, env)
    outs = [program.read_operand(env, v) for v in flat.outputs]
    return jax.tree.unflatten(jax.tree.structure(shape), outs)

  return run_checkpointed


@dataclasses.dataclass(eq=False)
class _CheckpointedScan(program.Step):
  """A scan whose body runs under `jax.checkpoint`."""

  policy: Policy | None

  def run(self, operands: Sequence[Any]) -> Sequence[Any]:
    """Runs the scan with its body under `jax.checkpoint`."""
    body_jaxpr, count, carried = core.scan_parts(self.params)
    body = jax.checkpoint(
      core.jax_core.jaxpr_as_fun(body_jaxpr),
      policy=self.policy,
      prevent_cse=False,
    )
    consts, last = operands[:count], count + carried

    def iteration(carry: Any, x: Any) -> Any:
      outs = body(*consts, *carry, *x)
      return outs[:carried], outs[carried:]

    options = {k: self.params[k] for k in ("length", "reverse", "unroll")}
    init, xs = list(operands[count:last]), list(operands[last:])
    with self.named():
      carry, ys = lax.scan(iteration, init, xs, **options)
    return [*carry, *ys]


class Landmarks(NamedTuple):
  """Names by `checkpoint_name` in a program, and whether it has scans."""

  names: tuple[str, ...]
  has_loops: bool


def find_landmarks(jaxpr: Any) -> Landmarks:
  """Finds the names and the loops of a program."""
  names: dict[str, None] = {}
  has_loops = False
  for step in program.flatten(jaxpr).steps:
    has_loops |= step.name == "scan"
    if step.name == "name":
      names[step.params["name"]] = None
    for inner in program.inner_jaxprs(step.eqn):
      names.update(dict.fromkeys(find_landmarks(inner).names))
  return Landmarks(tuple(names), has_loops)


def list_stock_recipes(landmarks: Landmarks) -> Iterator[Recipe]:
  """Yields `jax.checkpoint` by each policy, of the whole and of loop bodies."""
  for name in _PLAIN_POLICIES:
    policy = getattr(_POLICIES, name) if name else None
    yield _make_stock(name, policy, False)
    if landmarks.has_loops:
      yield _make_stock(name, policy, True)


def list_offload_recipes(landmarks: Landmarks) -> Iterator[Recipe]:
  """Yields `jax.checkpoint` by policies that save on the host."""
  # Only arrays of loop bodies are listed. Outside of loops, XLA sends such
  # arrays when the backward pass reads them, so that they take as much memory
  # as before.
  if not landmarks.has_loops:
    return
  places = ("device", "pinned_host")
  products = _POLICIES.offload_dot_with_no_batch_dims(*places)
  yield _make_stock("offload_dot_with_no_batch_dims", products, True, True)
  if landmarks.names:
    shown = ", ".join(map(repr, landmarks.names))
    only = _POLICIES.save_and_offload_only_these_names(
      names_which_can_be_saved=[],
      names_which_can_be_offloaded=list(landmarks.names),
      offload_src=places[0],
      offload_dst=places[1],
    )
    words = f"save_and_offload_only_these_names(offloaded: {shown})"
    yield _make_stock(words, only, True, True)


def _make_stock(
  name: str,
  policy: Policy | None,
  in_loops: bool,
  is_on_host: bool = False,
) -> Recipe:
  """Makes the recipe of `jax.checkpoint` by a policy."""
  words = f"jax.checkpoint(policy={name})" if name else "jax.checkpoint"
  if in_loops:
    words += " of loop bodies"
  return Recipe(
    words, "stock", policy=policy, in_loops=in_loops, is_on_host=is_on_host
  )


def list_name_recipes(landmarks: Landmarks) -> Iterator[Recipe]:
  """Yields `jax.checkpoint` by policies of names."""
  names = landmarks.names

  def make(words: str, policy: Policy) -> Recipe:
    # If there are loops, their bodies alone are wrapped.
    return _make_stock(words, policy, landmarks.has_loops)

  def save_only(*some: str) -> Recipe:
    words = f"save_only_these_names({', '.join(map(repr, some))})"
    return make(words, _POLICIES.save_only_these_names(*some))

  if names:
    yield save_only(*names)
    both = _POLICIES.save_from_both_policies(
      _POLICIES.dots_with_no_batch_dims_saveable,
      _POLICIES.save_only_these_names(*names),
    )
    shown = ", ".join(map(repr, names))
    yield make(f"save_from_both_policies(no batch dims, {shown})", both)
  for name in names[:_MOST_NAMES]:
    if others := [other for other in names if other != name]:
      yield save_only(name)
      yield save_only(*others)
    but = _POLICIES.save_anything_except_these_names(name)
    yield make(f"save_anything_except_these_names({name!r})", but)
