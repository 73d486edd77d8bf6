"""Plants faults in a copy of the library, and says which tests find them.

  python -m tests.planted_faults [NAME ...]

Run it before and after tests are made fewer: what found a fault must find it
again. Each fault takes about a minute. Your checkout is not changed.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

from tests.paths import ROOT


class Fault(NamedTuple):
  """One wrong line.

  Attributes:
    right: text that stands once in the library.
    wrong: what takes its place.
    tests: folders of `tests` that should notice.
  """

  right: str
  wrong: str
  tests: str


FAULTS = {
  "feedback forgets the value": Fault(
    "kernels.ErrorMemory(count, value, remembered)",
    "kernels.ErrorMemory(count, value * 0, remembered)",
    "codecs",
  ),
  "the error has the wrong sign": Fault(
    "clear_error(memory.value - decode(",
    "clear_error(memory.value + decode(",
    "codecs kernels",
  ),
  "a mean is a sum": Fault(
    "mean = total / plan.workers", "mean = total", "collectives"
  ),
  "a key is used twice": Fault("key.fold(plan.workers)", "key", "collectives"),
  "a sum is a mean": Fault(
    "jnp.promote_types(y.dtype, jnp.float32)) * plan.workers",
    "jnp.promote_types(y.dtype, jnp.float32))",
    "collectives",
  ),
  "updates that are made count as skipped": Fault(
    " skipped = skipped + (1 - ok.astype(jnp.int32))",
    " skipped = skipped + ok.astype(jnp.int32)",
    "transforms",
  ),
  "small norms are clipped": Fault(
    "jnp.where(norm < max_norm, x, clipped)",
    "jnp.where(norm > max_norm, x, clipped)",
    "transforms",
  ),
  "a fragment is due a step late": Fault(
    "(since > 0) & (since % gap == 0)",
    "(since > 0) & (since % gap == 1 % gap)",
    "transforms",
  ),
  "the outer gradient has the wrong sign": Fault(
    "lambda a, p: a - p, start, own",
    "lambda a, p: p - a, start, own",
    "transforms presets",
  ),
  "own and mean parameters are swapped in a mix": Fault(
    "self.mix * own + (1 - self.mix) * new",
    "self.mix * new + (1 - self.mix) * own",
    "transforms presets",
  ),
  "two axes are swapped": Fault(
    "both, local_axis = axes.names, axes.devices",
    "both, local_axis = axes.names, axes.hosts",
    "collectives",
  ),
  "a share leaves the next microbatch out": Fault(
    "float(a[i] + (counts[i] + 1) / v[i])",
    "float(a[i] + counts[i] / v[i])",
    "hetero",
  ),
  "a scan's bytes count once": Fault(
    '_count_moves(body, wanted, context), step.params["length"]',
    "_count_moves(body, wanted, context), 1",
    "wire",
  ),
  "a shared link is as fast as one's own": Fault(
    "nbytes * self.shared_by / self.rate", "nbytes / self.rate", "perfmodel"
  ),
  "masks are computed again from rounded values": Fault(
    "return eqn.primitive.name in DISCONTINUOUS and",
    "return eqn.primitive.name not in DISCONTINUOUS and",
    "memory program",
  ),
  "a resized memory holds another error": Fault(
    "own = own + self.codec.decode(sent, zeros)",
    "own = own + 1 + self.codec.decode(sent, zeros)",
    "codecs checkpoint",
  ),
  "levels rise a step early": Fault(
    "rises = streak == self.patience",
    "rises = streak == self.patience - 1",
    "controllers",
  ),
  "the smallest elements are selected": Fault(
    "lax.top_k(_to_ordered_floats(cut).T, k)",
    "lax.top_k(-_to_ordered_floats(cut).T, k)",
    "kernels codecs",
  ),
  "resized parameters are not weighed": Fault(
    "jnp.where(weight > 0, weight * rows, 0)",
    "jnp.where(weight > 0, rows, 0)",
    "checkpoint",
  ),
  "a skipped update keeps the new statistics": Fault(
    "jnp.where(skipped, b, a) if is_floating(a)",
    "jnp.where(skipped, a, a) if is_floating(a)",
    "transforms",
  ),
}


def find_file(fault: Fault, root: pathlib.Path) -> pathlib.Path:
  """Returns the one file of the library in which a fault can be planted."""
  files = (root / "jaxmotion").rglob("*.py")
  (file,) = [p for p in files if fault.right in p.read_text()]
  assert file.read_text().count(fault.right) == 1
  return file


def find_failure(fault: Fault, root: pathlib.Path) -> str | None:
  """Returns the first test that fails with a fault in the library."""
  file = find_file(fault, root)
  text = file.read_text()
  file.write_text(text.replace(fault.right, fault.wrong))
  folders = [f"tests/{name}" for name in fault.tests.split()]
  done = subprocess.run(
    [sys.executable, "-m", "pytest", "-qx", "-n", "2", *folders],
    cwd=root,
    capture_output=True,
    text=True,
  )
  file.write_text(text)
  failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
  return failed and failed[1]


def main(names: list[str]) -> None:
  """Prints the test that finds each fault."""
  with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(folder, "copy")
    ignored = shutil.ignore_patterns(".*", "__pycache__")
    shutil.copytree(ROOT, root, ignore=ignored)
    for name in names or FAULTS:
      found = find_failure(FAULTS[name], root)
      print(f"{name}: {found or 'not found'}", flush=True)


if __name__ == "__main__":
  main(sys.argv[1:])
