r"""Searches the largest model that trains in a fixed memory of this machine.

  python -m experiments.residuals.resident --limit_gb=2 \
    --json=docs/results/residuals_resident.jsonl

A decoder trains by AdamW in a control group whose memory is limited: a step
that needs more is killed. Of three sizes, two stay at their least and one
grows: batch, layers and length. The table has the largest that ran. Each try is
a process of its own, which compiles and makes parameters before its memory is
limited. So the limit is that of parameters, state, batch and temporaries, as on
a device.

  used       most bytes that the group held;
  compiled   bytes of arguments, results and temporaries of the compiled step;
  loss after held-out loss after --steps at the least sizes, without a limit.

`offload` is left out: a CPU has no other memory. It needs root, and Linux.
"""

import ctypes
import gc
import itertools
import multiprocessing
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import rich.progress
from absl import flags

from experiments.common import list_flags, records, shared_flags, signals
from experiments.common.console import JobError, make_console
from experiments.common.records import Measured
from experiments.residuals import cases, control_group, limits, tables
from experiments.train import decoder
from jaxmotion import memory, perfmodel, planner

Loss = Callable[..., Any]


class Mode(NamedTuple):
  """A way to train: what wraps the loss, and the optimizer."""

  wrap: Callable[[Loss], Loss] | None = None  # None: planned for the limit.
  blocks: bool = False  # Whether blocks are wrapped, and not the whole loss.
  optimizer: Callable[..., optax.GradientTransformation] = optax.adamw


def _compress(codec: Any = None, **options: Any) -> Callable[[Loss], Loss]:
  """Returns what saves residuals through a codec."""
  return lambda fn: memory.compress_residuals(fn, codec, **options)


MODES = {
  "plain": Mode(lambda fn: fn),
  "jax_checkpoint": Mode(jax.checkpoint, blocks=True),
  "lossless": Mode(_compress()),
  "int8": Mode(_compress(cases.INT8)),
  "int4": Mode(_compress(cases.INT4)),
  "lossless_least": Mode(_compress(memory_budget=0.0)),
  "adamw_8bit": Mode(lambda fn: fn, optimizer=memory.adamw_8bit),
  "int4_adamw_8bit": Mode(_compress(cases.INT4), optimizer=memory.adamw_8bit),
  "fitted": Mode(),
}
"""Modes of training by name; `plain` comes first."""

LEAST = decoder.Shape(layers=4, channels=256, heads=4, length=128, batch=8)
"""Sizes that do not grow."""

GROWING = ("batch", "layers", "length")
"""Sizes that grow, each alone."""


_PLANNED_SHARE = 0.9
"""Part of the limit that a plan may compile to; libraries take some beside."""


class Used(NamedTuple):
  """Memory of a step that ran or was killed."""

  compiled_bytes: int
  used_bytes: int | None  # None if it was killed.
  step_s: float | None
  limit_bytes: int

  @property
  def device_bytes(self) -> int:
    """Bytes that were used, or more than the limit."""
    if self.used_bytes is None:
      return max(self.compiled_bytes, self.limit_bytes + 1)
    return self.used_bytes


def run_step(
  sender: Connection, mode: str, shape: decoder.Shape, limit_bytes: int
) -> None:
  """Compiles a step, limits this process's memory, and runs the step twice."""
  model = decoder.Decoder(shape, stacked=True)
  try:
    init, step = make_step(mode, model, limit_bytes)
  except planner.BudgetTooSmallError as error:
    sender.send(error.least_bytes)
    return
  likes = model.network.batch(shape.batch)
  batch = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), likes)
  # Making parameters may take more memory than the step does.
  made = jax.tree.map(np.array, jax.jit(init)())
  compiled: Any = jax.jit(step, donate_argnums=0).lower(made, batch).compile()
  del model, init, step
  figures = compiled.memory_analysis()
  sender.send(
    figures.argument_size_in_bytes
    + figures.temp_size_in_bytes
    + figures.output_size_in_bytes
    - figures.alias_size_in_bytes
  )
  gc.collect()
  # The step would take pages that the compiler has freed, which do not count.
  ctypes.CDLL(None).malloc_trim(0)
  with control_group.limit_memory(limit_bytes) as group:
    args = jax.device_put(made, may_alias=False)
    for _ in range(2):
      begin = time.perf_counter()
      args, loss = jax.block_until_ready(compiled(args, batch))
    sender.send((group.read_peak(), time.perf_counter() - begin))
    del args, loss


def try_size(mode: str, shape: decoder.Shape, limit_bytes: int) -> Used:
  """Runs a step in a process of its own, which may be killed."""
  context = multiprocessing.get_context("spawn")
  receiver, sender = context.Pipe(duplex=False)
  args = sender, mode, shape, limit_bytes
  process = context.Process(target=run_step, args=args, daemon=True)
  process.start()
  sender.close()
  try:
    compiled_bytes = receiver.recv()
    used_bytes, step_s = receiver.recv()
  except EOFError:
    used_bytes = step_s = None
  except BaseException:
    process.kill()
    raise
  finally:
    process.join()
    control_group.remove_group(f"{process.pid}")
  # A plan that does not fit ends the process itself.
  if used_bytes is None and process.exitcode not in (0, -signal.SIGKILL):
    raise JobError(f"The step of {mode} ended with {process.exitcode}.")
  return Used(compiled_bytes, used_bytes, step_s, limit_bytes)


def find_largest(
  mode: str, growing: str, limit_bytes: int
) -> limits.FittingSize | None:
  """Finds the largest size that ran, of three of which two stay."""

  def try_growing(size: int) -> Used:
    shape = LEAST._replace(**{growing: size})
    return try_size(mode, shape, limit_bytes)

  least = getattr(LEAST, growing)
  # A step that was killed needs more than is known, by some per cent.
  return limits.search_largest(
    try_growing, limit_bytes, (least, 2 * least), miss_share=0.02
  )


def train_mode(mode: str, steps: int, limit_bytes: int) -> float:
  """Trains the least model for some steps; returns its held-out loss."""
  model = decoder.Decoder(LEAST, stacked=True)
  init, step = make_step(mode, model, limit_bytes)
  state, run = jax.jit(init)(), jax.jit(step, donate_argnums=0)
  for i in range(steps):
    state, loss = run(state, model.make_batch(0, i, 0, 1))
    jax.block_until_ready(loss)
  evaluate = jax.jit(lambda params, batch: model.network.loss(params, batch))
  return float(evaluate(state[0], model.held_out(0, 1)))


def make_step(
  name: str, model: decoder.Decoder, limit_bytes: float, peak: float = 1e-3
) -> tuple[Callable[[], Any], Callable[..., Any]]:
  """Returns functions that make the state, and train it by one batch."""
  mode, net = MODES[name], model.network
  tx = mode.optimizer(peak, weight_decay=decoder.WEIGHT_DECAY)
  wrap, wrap_block = mode.wrap, None
  if wrap is not None and mode.blocks:
    wrap_block = lambda block, _: wrap(block)
  loss_fn: Loss = lambda params, batch: net.loss(params, batch, wrap_block)
  if wrap is None:
    plan = planner.fit_memory(
      loss_fn,
      net.params,
      (net.batch(model.shape.batch),),
      perfmodel.builtin_platform("h100_node"),
      _PLANNED_SHARE * limit_bytes,
      optimizer=tx,
    )
    loss_fn = plan.wrap(loss_fn)
  elif not mode.blocks:
    loss_fn = wrap(loss_fn)

  def init() -> Any:
    params = net.init(jax.random.key(0))
    return params, tx.init(params)

  def step(state: Any, batch: Any) -> Any:
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss

  return init, step


_LIMIT = flags.DEFINE_float(
  "limit_gb", 2.0, "Memory of a step, 10^9 bytes.", 1e-9, allow_override=True
)
_MODES = list_flags.define_names("modes", MODES, MODES, "Modes of training.")
_GROWING = list_flags.define_names(
  "growing", GROWING, GROWING, "Sizes that grow.", least=0
)
_STEPS = flags.DEFINE_integer(
  "steps", 200, "Steps before `loss_after`; 0: none.", 0, allow_override=True
)
_JSON = shared_flags.define_rows()
_FRESH = shared_flags.define_fresh()


def measure_case(mode: str, growing: str) -> records.Metrics:
  """Returns the figures of a mode: of one size that grows, or after steps."""
  limit_bytes = int(_LIMIT.value * 1e9)
  if growing == tables.LOSS_AFTER:
    loss = train_mode(mode, _STEPS.value, limit_bytes)
    return {"loss_after": Measured(loss, "nats/byte")}
  found = find_largest(mode, growing, limit_bytes)
  if found is None:
    return {"size": Measured(0, growing)}
  used: Used = found.memory
  return {
    "size": Measured(found.size, growing),
    "used": Measured(used.device_bytes, "bytes"),
    "compiled": Measured(used.compiled_bytes, "bytes"),
    "step_s": Measured(used.step_s, "s"),
  }


def main() -> None:
  """Measures all modes, prints the table and writes rows."""
  # Groups are removed when their step ends, so SIGTERM must wait for that.
  signals.exit_on_sigterm()
  if why := control_group.explain_refusal():
    raise JobError(f"Memory cannot be limited here: {why}.")
  columns = [*_GROWING.value, *([tables.LOSS_AFTER] if _STEPS.value else [])]
  kept = {} if _FRESH.value else records.read_cases(_JSON.value)
  todo = [
    (mode, growing)
    for mode in _MODES.value
    for growing in columns
    if f"{mode}/{growing}" not in kept
  ]
  for mode, growing in rich.progress.track(todo):
    name = f"{mode}/{growing}"
    metrics = {name: measure_case(mode, growing)}
    kept[name] = records.make_rows(tables.RESIDENT, metrics)
    records.write_rows(_JSON.value, itertools.chain(*kept.values()))
  table = tables.resident_table(list(itertools.chain(*kept.values())))
  make_console().print(table.to_console())


if __name__ == "__main__":
  shared_flags.run_main(main)
