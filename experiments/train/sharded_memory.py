"""Reads memory and bytes of sharded parameters from compiled programs.

  python -m experiments.train.sharded_memory --json=results/sharded.jsonl

A model of 12 dense layers in a scan trains by AdamW on 4 emulated devices,
sharded with each codec, and on 2 hosts of 2 devices. Nothing is timed. The unit
of all figures is the bytes of all parameters in float32:
  held       parameters and moments on a device;
  temporary  temporaries of the compiled step;
  hosts      bytes that a device sends between hosts in a step;
  devices    bytes that it sends within its host.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import flags
from jax import lax

import jaxmotion
from experiments.common import console, records, shared_flags
from experiments.common.records import Measured
from experiments.train import rows as train_rows
from jaxmotion import HostAxes, codecs, transforms, wire

_LAYERS, _WORKERS = 12, 4
_WIDTH = flags.DEFINE_integer(
  "width", 512, "Rows and columns of a layer.", 64, allow_override=True
)
_JSON = shared_flags.define_rows()

_CODED: dict[str, Any] = {
  "weight_codec": codecs.uniform(bits=8, block=2048),
  "gradient_codec": codecs.uniform(bits=4, block=512, rounding="stochastic"),
}
_LOCAL = {"local_codec": _CODED["gradient_codec"]}
OPTIONS: dict[str, dict[str, Any] | None] = {
  "replicated": None,
  "float32": {},
  "int8_int4": _CODED,
  "int8_int4_kept": _CODED | {"regather": False},
  "hosts_float32": {},
  "hosts_int8_int4": _CODED | _LOCAL,
  "hosts_int8_int4_local": _CODED | _LOCAL | {"regather": "local"},
}
"""Options of `fully_sharded` by case; None holds all parameters."""


def _layer(params: Any, x: jax.Array) -> jax.Array:
  return jnp.tanh(x @ params["w"])


def _make_loss(block: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
  """Returns the loss of a model of equal blocks."""

  def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    step = lambda x, own: (block(own, x), None)
    return jnp.mean(lax.scan(step, batch, params["layers"])[0] ** 2)

  return loss_fn


def measure_case(name: str, width: int) -> records.Metrics:
  """Compiles the step of a case; returns its figures."""
  options, devices = OPTIONS[name], jax.devices()[:_WORKERS]
  axes: HostAxes | str = "data"
  mesh = jax.make_mesh((_WORKERS,), ("data",), devices=devices)
  if name.startswith("hosts"):
    axes = HostAxes("host", "device")
    mesh = jax.make_mesh((2, _WORKERS // 2), axes.names, devices=devices)
  adamw = optax.adamw(1e-3)
  if options is None:
    scheme: Any = optax.chain(jaxmotion.exchange(axes), adamw)
    loss_fn = _make_loss(jax.checkpoint(_layer))
  else:
    scheme = jaxmotion.fully_sharded(adamw, stacked="layers/", **options)
    loss_fn = _make_loss(transforms.gather_block(_layer))
  init, step = jaxmotion.make_train_step(loss_fn, scheme, mesh, axis_name=axes)
  params = {"layers": {"w": jnp.zeros((_LAYERS, width, width))}}
  state, batch = init(params), jnp.zeros((_WORKERS, width))
  program: Any = jax.jit(step).lower(state, batch).compile()
  unit = _LAYERS * 4 * width**2
  held = sum(
    leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state)
  )
  figures = {
    "held": held,
    "temporary": program.memory_analysis().temp_size_in_bytes,
  }
  if isinstance(axes, HostAxes):
    sent = wire.compiled_bytes(program, mesh=mesh).per_axis()
    figures |= {"hosts": sent[("host",)], "devices": sent[("device",)]}
  return {
    metric: Measured(nbytes / unit, "parameters")
    for metric, nbytes in figures.items()
  }


def main() -> None:
  """Compiles all cases, prints the table and writes rows."""
  jax.config.update("jax_num_cpu_devices", _WORKERS)
  found = {name: measure_case(name, _WIDTH.value) for name in OPTIONS}
  rows = records.make_rows(train_rows.SHARDED_MEMORY, found)
  table = train_rows.summary_table(rows)
  console.make_console().print(table.to_console())
  records.write_rows(_JSON.value, rows)


if __name__ == "__main__":
  shared_flags.run_main(main)
