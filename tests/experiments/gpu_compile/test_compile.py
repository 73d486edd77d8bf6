import importlib.metadata
import json
import os
import re
import subprocess
import sys

import jaxlib
import pytest

from experiments import gpu_compile
from tests.paths import ROOT

# JAX has to be told before it starts that it will find no GPU.
PROGRAM = """
import json

import jax
import jax.numpy as jnp

from experiments import gpu_compile
from jaxmotion.kernels import _triton

SIZE = 1 << 20
x = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
few = jax.ShapeDtypeStruct((256,), jnp.float32)
index = jax.ShapeDtypeStruct((256,), jnp.int32)


def double(x_ref, y_ref):
  at = _triton.tile_index() * 1024 + jnp.arange(1024)
  _triton.store(y_ref, at, 2 * _triton.load(x_ref, at))


def kernel(x):
  return _triton.call_kernel(double, "double", SIZE // 1024, 1024, [x], x)


def repeat(x):
  return jax.lax.fori_loop(0, 7, lambda _, y: jnp.sin(y) + 1, x)


def twice(x):
  y = jnp.cumsum(x.reshape(-1, 256), axis=1)
  return (y / jnp.max(y)).astype(jnp.float16)


programs = {
  "scale": (lambda x: 2 * x, (x,), {}),
  "kernel": (kernel, (x,), {}),
  "loop": (repeat, (x,), {}),
  "update": (lambda x, i, v: x.at[i].add(v), (x, index, few),
             {"donate_argnums": 0}),
  "twice": (twice, (x,), {"gpu": "H200"}),
}
found = {}
for name, (fn, args, options) in programs.items():
  c = gpu_compile.compile_for(fn, *args, **options)
  kinds = ("alias", "argument", "output", "temp")
  sizes = {k: getattr(c.memory, f"{k}_size_in_bytes") for k in kinds}
  found[name] = {
    "gpu": c.gpu.kind, **{f"{k}_bytes": n for k, n in sizes.items()},
    "launches": c.launches, "traffic_bytes": c.traffic_bytes,
    "assembly": [a._asdict() for a in c.assembly],
  }
print(json.dumps(found))
"""
BYTES = 4 << 20


@pytest.mark.skipif(
  gpu_compile.explain_refusal() is not None, reason="cannot be compiled"
)
def test_kernels_traffic_and_memory_of_programs_are_those_expected():
  done = subprocess.run(
    [sys.executable, "-c", PROGRAM],
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  # An elementwise function is one kernel of wide accesses.
  scale = found["scale"]
  assert (scale["launches"], scale["traffic_bytes"]) == (1, 2 * BYTES)
  (assembly,) = scale["assembly"]
  assert set(assembly["loads"]) == set(assembly["stores"]) == {"16"}
  assert assembly["spill_bytes"] in (0, None)
  # A Pallas kernel is one kernel.
  kernel = found["kernel"]
  assert (kernel["launches"], kernel["traffic_bytes"]) == (1, 2 * BYTES)
  (assembly,) = kernel["assembly"]
  assert assembly["name"] == "double"
  assert assembly["loads"] == assembly["stores"] == {"16": 4}
  # Every iteration of a loop counts.
  assert found["loop"]["traffic_bytes"] >= 7 * 2 * BYTES
  # A donated argument is updated in place.
  update = found["update"]
  assert update["alias_bytes"] == update["output_bytes"] == BYTES
  assert update["temp_bytes"] == 0
  assert update["traffic_bytes"] < BYTES
  # A value that is read twice has a temporary.
  twice = found["twice"]
  assert twice["gpu"] == "NVIDIA H200"
  assert twice["launches"] > 1
  assert twice["temp_bytes"] >= BYTES
  assert twice["argument_bytes"] == 2 * twice["output_bytes"] == BYTES


def test_a_gpu_nobody_described_or_without_memory_is_refused():
  with pytest.raises(ValueError, match="`gpu` must be one of 'H100', 'H200'"):
    gpu_compile.compile_for(abs, 1.0, gpu="Z80")
  with pytest.raises(ValueError, match="`memory_gib` must be positive, got 0"):
    gpu_compile.compile_for(abs, 1.0, memory_gib=0)


def test_the_checks_of_a_bare_clone_ask_for_a_refusal_that_exists(capsys):
  text = (ROOT / ".ci" / "run").read_text()
  (program,) = re.findall(
    r"bin/python -c \\\n\s*'([^']*gpu_compile[^']*)'", text
  )
  exec(program, {})
  assert capsys.readouterr().out.strip() == (
    gpu_compile.explain_refusal() or ""
  )


def test_the_refusal_names_missing_wheels_and_other_versions(monkeypatch):
  def version(name):
    raise importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(importlib.metadata, "version", version)
  assert "`cuda-compile` is not installed" in gpu_compile.explain_refusal()
  with pytest.raises(RuntimeError, match="cuda-compile"):
    gpu_compile.compile_for(abs, 1.0)
  monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1")
  assert "0.0.1" in gpu_compile.explain_refusal()
  assert jaxlib.__version__ in gpu_compile.explain_refusal()
