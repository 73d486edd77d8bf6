"""A function at some arguments, split into its two passes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from jaxmotion.core import Array, PyTree, abstract_like, leaf_path, scan_parts
from jaxmotion.memory.residuals.choose import (
  Diagnostics,
  Options,
  Residual,
  Selection,
)
from jaxmotion.memory.residuals.run import (
  HostBuffers,
  backward,
  forward,
  plain,
  run_loop,
)
from jaxmotion.memory.residuals.trace import (
  evaluate_max_pool,
  is_max_pool,
  is_smooth,
  trace_joint,
)
from jaxmotion.program import Step, evaluate, flatten, read_operand


class TracedFunction:
  """A function at some arguments, split.

  Args:
    fn: the function.
    args: its arguments.
    params: which of them are there anyway.
    options: how residuals are chosen and kept.
    prefix: of the names of residuals.
    repeats: how often it runs with residuals of its own.

  Raises:
    ValueError: it has side effects, or `params` are not arguments.
  """

  def __init__(
    self,
    fn: Callable[..., PyTree],
    args: Sequence[PyTree],
    params: int | Sequence[int],
    options: Options,
    prefix: str = "",
    repeats: int = 1,
  ):
    paths, tree = jax.tree_util.tree_flatten_with_path(tuple(args))
    self.leaves = [leaf for _, leaf in paths]
    self._options = options
    self._prefix, self._repeats = prefix, repeats
    self._inner: list[TracedFunction] = []
    free = _argnums(params, len(args))

    def flat(*leaves: Array) -> list[Array]:
      outs, self.out_tree = jax.tree.flatten(
        fn(*jax.tree.unflatten(tree, leaves))
      )
      return outs

    closed = jax.make_jaxpr(flat)(*self.leaves)
    _check_effects(fn, closed.jaxpr.effects)
    self._program = flatten(closed)
    # Arrays of an enclosing trace, which may want a gradient of their own.
    outer = {
      v: c
      for v, c in self._program.constants.items()
      if isinstance(c, jax.core.Tracer)
    }
    self.constants = list(outer.values())
    self._inputs = [*outer, *self._program.inputs]
    self._smooth = [is_smooth(a) for a in closed.out_avals]
    joint = trace_joint(
      self._call, [*self.constants, *self.leaves], closed.out_avals
    )
    labels = [f"closed_over_{i}" for i in range(len(outer))]
    labels += [leaf_path(path) for path, _ in paths]
    self.split = Selection(
      joint,
      labels,
      [*(True for _ in outer), *(path[0].idx in free for path, _ in paths)],
      options,
      prefix,
      repeats,
    )

  def residuals(self) -> list[Residual]:
    """Returns what is kept, of the loops in it too."""
    kept = [k.residual for k in self.split.kept]
    if self._inner:
      # What a loop hands on is counted where it is kept.
      kept = [r for r in kept if not r.is_of_loop]
    return kept + [r for inner in self._inner for r in inner.residuals()]

  def computed_again(self) -> list[str]:
    """Returns names of what was to be computed again, in loops too."""
    inner = [name for i in self._inner for name in i.computed_again()]
    return self.split.again + inner

  def __call__(
    self, leaves: Sequence[Array] | None = None
  ) -> tuple[PyTree, Diagnostics]:
    """Returns the result, and what there is to say of it.

    Args:
      leaves: of the arguments; None: those that it was traced with.
    """
    split, many = self.split, len(self.constants)

    @jax.custom_vjp
    def run(constants: list[Array], leaves: list[Array]) -> Any:
      return plain(split, [*constants, *leaves])

    def keep(constants: list[Array], leaves: list[Array]) -> Any:
      inputs = [*constants, *leaves]
      outs, words = forward(split, inputs)
      return outs, (split.only_free(inputs), words)

    def pull(kept: Any, cotangents: Any) -> Any:
      free, words = kept
      cts = self.smooth(cotangents[0])
      gradients = backward(split, free, words, cts)
      return gradients[:many], gradients[many:]

    run.defvjp(keep, pull)
    given = self.leaves if leaves is None else list(leaves)
    outs, notes = run(self.constants, given)
    return jax.tree.unflatten(self.out_tree, outs), notes

  def smooth(self, cotangents: Sequence[Any]) -> list[Any]:
    """Returns the cotangents of those results that have some."""
    pairs = zip(cotangents, self._smooth, strict=True)
    return [ct for ct, smooth in pairs if smooth]

  def forward(
    self,
  ) -> tuple[tuple[list[Array], Diagnostics], list[list[Array]]]:
    """Returns the results, notes on them, and what is kept."""
    return forward(self.split, [*self.constants, *self.leaves])

  def _call(self, *values: Array) -> tuple[list[Any], Diagnostics]:
    """The function, with loops and maxima over windows of our own."""
    env = {
      **self._program.constants,
      **dict(zip(self._inputs, values, strict=True)),
    }
    notes = Diagnostics.none()
    scans = 0
    for step in self._program.steps:
      if is_max_pool(step):
        env[step.outs[0]] = evaluate_max_pool(
          step, read_operand(env, step.ins[0])
        )
      elif step.name == "scan":
        operands = [read_operand(env, v) for v in step.ins]
        outs, seen = self._scan(step, operands, f"{self._prefix}scan_{scans}/")
        env.update(zip(step.outs, outs, strict=True))
        notes, scans = notes.add(seen), scans + 1
      else:
        evaluate([step], env)
    return [read_operand(env, v) for v in self._program.outputs], notes

  def _scan(
    self, step: Step, operands: Sequence[Array], prefix: str
  ) -> tuple[list[Array], Diagnostics]:
    """Runs a loop whose steps keep little."""
    params = step.eqn.params
    body, consts, carried = scan_parts(params)
    fixed, rows, start = _grouped(operands, consts, carried)

    def once(fixed: Any, xs: Any, carry: Any) -> Any:
      outs = core.jaxpr_as_fun(body)(*fixed, *carry, *xs)
      return outs[:carried], outs[carried:]

    inner = TracedFunction(
      once,
      _grouped([abstract_like(a) for a in body.in_avals], consts, carried),
      (0, 1),
      self._options,
      prefix,
      self._repeats * params["length"],
    )
    self._inner.append(inner)
    options = {k: params[k] for k in ("length", "reverse", "unroll")}
    words_of = HostBuffers([k.residual for k in inner.split.kept])
    if words_of:
      fixed = [*inner.constants, *fixed]
      (carry, ys), notes = run_loop(
        inner.split, words_of, fixed, start, rows, **options
      )
      return [*carry, *ys], notes

    def compressed(carry: Any, row: Any) -> Any:
      (carry, ys), notes = inner([*fixed, *row, *carry])
      return carry, (ys, notes)

    carry, (ys, notes) = lax.scan(compressed, start, rows, **options)
    return [*carry, *ys], notes.over_steps()


def _grouped(
  values: Sequence[Any], consts: int, carried: int
) -> tuple[list[Any], list[Any], list[Any]]:
  """What is fixed, rows and what is carried, of a loop's operands."""
  last = consts + carried
  fixed, start, rows = values[:consts], values[consts:last], values[last:]
  return list(fixed), list(rows), list(start)


def _argnums(params: int | Sequence[int], count: int) -> set[int]:
  nums = (params,) if isinstance(params, int) else tuple(params)
  for num in nums:
    if type(num) is not int or not 0 <= num < count:
      raise ValueError(
        f"`params` must be positions of the {count} arguments, got {params!r}."
      )
  return set(nums)


def _check_effects(fn: Callable[..., PyTree], effects: Any) -> None:
  # Inside shard_map the names of mesh axes count as effects.
  found = [e for e in effects if type(e).__name__ != "NamedAxisEffect"]
  if found:
    inner = fn.func if isinstance(fn, functools.partial) else fn
    name = getattr(inner, "__name__", repr(inner))
    raise ValueError(
      f"`fn` must have no side effects, got {name} with {found}: its backward "
      "pass may do parts of it again."
    )
