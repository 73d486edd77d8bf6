"""Jitted training steps, of one program or several, that check arguments."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxmotion import core, hosts, program
from jaxmotion.core import Array, PyTree
from jaxmotion.transforms._step import _step_arguments
from jaxmotion.transforms._step._results import LocalWork
from jaxmotion.transforms._step._scheme import Scheme, TrainState


def compile_step(
  step: Callable[..., Any],
  mesh: Mesh,
  *,
  donates: bool = False,
  prepare: Callable[[dict[str, Any]], dict[str, Any]] = dict,
  call: Callable[..., Any] | None = None,
  overlaps: bool = False,
) -> Any:
  """Jits a step, or a half of it, whose errors name the wrong argument."""
  # donates: whether the first argument is donated. `prepare` checks and
  # converts arguments that are given by keyword. `call` runs the step instead;
  # `overlaps` lets it run as several programs.
  # The state and the batch, or the state and the work, may be given by name.
  names = list(inspect.signature(step).parameters)[:2]
  jitted = jax.jit(step, donate_argnums=0 if donates else ())
  if overlaps and call is None:
    call = hosts.StagedStep(step, jitted, mesh, int(donates))
  in_flight = hosts.StepsInFlight(mesh)
  # Extra arguments that are known to change a result.
  read: set[str] = {"key", "counts"}

  @functools.wraps(step)
  def checked_step(*args: Any, **kwargs: Any) -> Any:
    """Runs the step; its errors name an argument that does not fit."""
    # JAX donates only what is given by position.
    rest = names[len(args) :]
    args += tuple(kwargs.pop(name) for name in rest if name in kwargs)
    kwargs = prepare(kwargs)
    _step_arguments.step_key("key", kwargs.get("key"))
    given = dict(zip(names, args, strict=False)) | kwargs
    # A look at every leaf, which only some steps need.
    is_new = not kwargs.keys() <= read
    is_traced = (is_new or call) and any(
      isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(given)
    )
    core.check_buffers(given, names[: int(donates)])
    in_flight.wait(given)
    try:
      if is_new and not is_traced:
        _check_read(jitted.trace(*args, **kwargs).jaxpr, args, kwargs, read)
        read.update(kwargs)
      run = call if call and not is_traced else jitted
      results = run(*args, **kwargs)
    except (TypeError, ValueError, OverflowError) as error:
      if "manual axes" in str(error):
        raise ValueError(
          "A loss must constrain no sharding over the workers' axis, of which "
          "it sees one part: leave the axis out of the constraint, or compute "
          "on the whole batch under `jax.jit`, with `jaxmotion.value_and_grad`."
          f" JAX says: {error}"
        ) from error
      # Only after an error: a step shall not look at every leaf.
      for name, tree in given.items():
        core.arrays(name, tree)
      core.check_on_mesh(given, mesh)
      raise
    in_flight.add(results[-1])
    return results

  for name in ("lower", "trace", "eval_shape"):
    setattr(checked_step, name, getattr(jitted, name))
  return checked_step


def _check_read(
  jaxpr: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: set[str]
) -> None:
  """Raises for an extra argument that no result depends on: a misspelt name."""
  if jaxpr.effects:  # A callback may read it.
    return
  # Each argument counts as an axis, over which what depends on it varies.
  marks = [frozenset[Any]()] * len(jax.tree.leaves(args))
  # As `jax.jit` flattens arguments by keyword.
  for name in sorted(kwargs):
    own = frozenset([("argument", name)])
    marks += [own] * len(jax.tree.leaves(kwargs[name]))
  result_axes = program.find_varying(jaxpr, marks, frozenset().union(*marks))
  for name in sorted(kwargs.keys() - known):
    if all(("argument", name) not in axes for axes in result_axes):
      raise TypeError(
        f"`{name}` must be an argument of the step or of the chain's update, "
        "got one that changes no result. The step itself takes `key` and "
        "`counts`."
      )


class FlyingStep:
  """Calls a step whose exchange may be in flight while later steps compute."""

  # Between CPU hosts the caller's thread computes what the next step needs, as
  # `Scheme.own` selects. A second thread computes the rest and sends. Results
  # are those of the one program, bit for bit.

  def __init__(
    self,
    scheme: Scheme,
    compute: Callable[..., LocalWork],
    update: Callable[..., tuple[TrainState, PyTree]],
    mesh: Mesh,
    *,
    donate: bool,
  ):
    # compute, update: the halves of the step. Only the second one depends on
    # the phase of the scheme, and is compiled for each.
    self._scheme = scheme
    donated = (0,) if donate else ()

    def compute_own(
      own: PyTree, rest: TrainState, batch: PyTree, **inputs: PyTree
    ) -> tuple[PyTree, LocalWork]:
      # A program does not wait for arguments of which it reads the shapes
      # alone. So the rest may still be in flight.
      work = compute(scheme.replace_own(rest, own), batch, **inputs)
      return work.grads, work._replace(grads=None)

    def update_rest(
      state: TrainState, work: LocalWork, **extra_args: Any
    ) -> tuple[TrainState, PyTree]:
      work = work._replace(grads=scheme.own(state))
      return update(state, work, **extra_args)

    self._compute = jax.jit(compute_own, donate_argnums=donated)
    self._update = hosts.StagedStep(
      update_rest,
      jax.jit(update_rest, donate_argnums=donated),
      mesh,
      len(donated),
      own=lambda made: (scheme.own(made[0]), scheme.count(made[0].opt_state)),
    )
    # Steps of the last state. To read its array would wait for that step.
    self._last: tuple[Array | None, int] = (None, 0)

  @core.declare(
    state=core.instance(TrainState, "the TrainState that `init` returned")
  )
  def __call__(
    self,
    state: TrainState,
    batch: PyTree,
    *,
    key: Array | None = None,
    counts: Array | None = None,
    **extra_args: Any,
  ) -> tuple[TrainState, PyTree]:
    """Runs a step; what it sends may be in flight when it returns."""
    scheme = self._scheme
    known: Any = scheme.count(state.opt_state)
    count = self._last[1] if known is self._last[0] else int(known)
    count = min(count + 1, 2**31 - 1)
    own, rest = scheme.own(state), scheme.replace_own(state, None)
    own, work = self._compute(own, rest, batch, key=key, counts=counts)
    sending = hosts.Sending(phase=scheme.find_phase(count))
    state, metrics = self._update(
      scheme.replace_own(state, own), work, sending=sending, **extra_args
    )
    self._last = scheme.count(state.opt_state), count
    return state, metrics
