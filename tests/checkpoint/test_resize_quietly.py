"""Resizes print nothing: no array is gathered against its will."""

import subprocess
import sys

from tests.paths import ROOT
from tests.processes import WAIT, environment

# XLA writes what it cannot reshard to the standard error of the process.
RESIZE = """
import jax, numpy as np, optax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec as P
from jaxmotion import checkpoint, codecs, transforms

params = {"w": np.ones((24, 24), "f"), "v": np.ones((64, 64), "f"),
          "b": np.ones(8, "f")}
specs = {"w": P("model"), "v": P(None, "model"), "b": P()}
codec = codecs.feedback(codecs.uniform(bits=4))
schemes = [
  optax.chain(transforms.exchange("data", codec), optax.adam(1e-3)),
  optax.chain(
    transforms.exchange("data", codec, method="two_phase"), optax.sgd(0.1)
  ),
  transforms.sharded("data", optax.adam(1e-3), gradient_codec=codec),
  transforms.fully_sharded(optax.adam(1e-3)),
]
devices = np.array(jax.devices()[:8]).reshape(4, 2)
# Each scheme once, beside an axis of the model or without, on either kind.
for i, (scheme, given) in enumerate(zip(schemes, (specs, specs, None, None))):
  kinds = ((AxisType.Auto, AxisType.Explicit)[i == 1],) * 2
  names, shards = ("data", "model"), 1 if given is None else 2
  old, one = (
    Mesh(devices[:workers, :shards], names, axis_types=kinds)
    for workers in (4, 1)
  )
  init, _ = transforms.make_train_step(abs, scheme, old, specs=given)
  layout = checkpoint.describe_state(init, params, old, specs=given)
  state = init(params).opt_state
  for new in (one, AbstractMesh((1, shards), names)):
    checkpoint.resize(init, state, params, layout, new, specs=given)
print("done")
"""


def test_a_resize_to_one_worker_prints_nothing():
  variables = {"JAX_NUM_CPU_DEVICES": "8", "TF_CPP_MIN_LOG_LEVEL": "1"}
  done = subprocess.run(
    [sys.executable, "-c", RESIZE],
    cwd=ROOT,
    env=environment(cache=False) | variables,
    capture_output=True,
    text=True,
    timeout=WAIT,
  )
  assert done.stdout == "done\n", done.stderr
  assert done.stderr == ""
