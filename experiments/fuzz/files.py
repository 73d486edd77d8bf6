"""Damaged files: a file gives what it says, or one line that names it.

Platforms, rows, archives of arrays, records and images are cut, flipped,
emptied, extended, replaced by another file, or get values of other types.
"""

import io
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from experiments.common import records
from experiments.common.records import Row
from experiments.data import image_files
from experiments.fuzz.rounds import Defect, Round
from jaxmotion import perfmodel

_CASES = 24  # Of each kind of file in a round.
Random = np.random.Generator


class Kind(NamedTuple):
  """A kind of file that is read."""

  name: str  # Name of the file; the suffix matters to readers.
  write: Callable[[Random], bytes]  # Returns the content of a valid file.
  read: Callable[[Path], Any]  # Returns the value of a file.
  # Returns why a content may not give a value, or None.
  explain: Callable[[bytes, bytes, Any], str | None]
  # Returns a content with a value of another type and what it swaps, if the
  # kind has types.
  swap: Callable[[Random, bytes], tuple[bytes, str]] | None = None


class Case(NamedTuple):
  """A file and what was done to it."""

  whole: bytes  # Content of the valid file.
  # Content after the damage; None for a folder in place of the file.
  damaged: bytes | None
  damage: str  # What was done.
  must_fail: bool = False  # Whether no value may be read.


def run_round(seed: int) -> Round:
  """Reads damaged files of every kind."""
  found: list[Defect] = []
  with tempfile.TemporaryDirectory() as folder:
    for number, kind in enumerate(KINDS):
      for index in range(_CASES):
        path = Path(folder, f"{number}-{index}", kind.name)
        path.parent.mkdir(parents=True)
        case = make_case(kind, seed, index)
        for law, detail in _check_case(kind, case, path):
          text = f"make_case(KINDS[{number}], {seed}, {index})"
          found.append(Defect(law, f"{text}: {case.damage}", detail))
  return Round(len(KINDS) * _CASES, tuple(found))


def make_case(kind: Kind, seed: int, index: int) -> Case:
  """Returns one damaged file of a kind."""
  random = np.random.default_rng([seed, KINDS.index(kind), index])
  whole = kind.write(random)
  at = int(random.integers(len(whole)))
  match index:
    case 0:
      return Case(whole, whole, "unchanged")
    case 1:
      return Case(whole, b"", "emptied")
    case 2:
      return Case(whole, None, "replaced by a folder", must_fail=True)
    case 3:
      # Any kind but this one.
      step = int(random.integers(1, len(KINDS)))
      other = KINDS[(KINDS.index(kind) + step) % len(KINDS)]
      return Case(whole, other.write(random), f"replaced by {other.name}")
  if kind.swap and index % 2:
    content, what = kind.swap(random, whole)
    return Case(whole, content, what, must_fail=True)
  match int(random.integers(4)):
    case 0:
      return Case(whole, whole[:at], f"cut to {at} bytes")
    case 1:
      tail = random.bytes(int(random.integers(1, 9)))
      return Case(whole, whole + tail, f"extended by {tail!r}")
    case 2:
      zeros = bytes(min(16, len(whole) - at))
      content = whole[:at] + zeros + whole[at + len(zeros) :]
      return Case(whole, content, f"zeros from byte {at}")
  bit = 1 << int(random.integers(8))
  content = whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :]
  return Case(whole, content, f"byte {at} changed by {bit}")


def _check_case(
  kind: Kind, case: Case, path: Path
) -> Iterator[tuple[str, str]]:
  """Yields the laws that reading a damaged file breaks."""
  if case.damaged is None:
    path.mkdir()
  else:
    path.write_bytes(case.damaged)
  law = "a file that cannot be read is named in one line"
  try:
    value = kind.read(path)
  except (OSError, TypeError, ValueError) as error:
    text = str(error)
    if str(path) not in text or "\n" in text:
      yield law, f"{type(error).__name__}: {text}"
    if case.damaged == case.whole:
      yield "a valid file is read", f"{type(error).__name__}: {text}"
    return
  except Exception as error:
    yield law, f"{type(error).__name__}: {error}"
    return
  if case.must_fail or case.damaged is None:
    yield "a value of another type is refused", f"got {value!r:.200}"
  else:
    try:
      why = kind.explain(case.whole, case.damaged, value)
    except ValueError as error:
      why = f"got {value!r:.200} of no valid file: {error}"
    if why:
      yield "a file gives the values that it says", why


def _read_strictly(content: bytes) -> Any:
  """Returns a JSON value; objects become lists of pairs, so none is lost."""
  return json.loads(content, object_pairs_hook=lambda pairs: {"": pairs})


def _to_pairs(tree: Any) -> Any:
  """Returns what `_read_strictly` would read, if nothing was lost."""
  if isinstance(tree, dict):
    return {"": [(k, _to_pairs(v)) for k, v in tree.items()]}
  return [_to_pairs(v) for v in tree] if isinstance(tree, list) else tree


def _write_platform(random: Random) -> bytes:
  curve = perfmodel.Curve(
    sizes=(10.0, 1e3), seconds=(1e-3, float(random.uniform(0.1, 1))), noise=0.1
  )
  link = perfmodel.Link(
    latency_s=float(random.uniform(1e-6, 1e-3)),
    rate=perfmodel.gbit_per_s(float(random.uniform(1, 100))),
    efficiency={"all_gather": 0.5},
    measured={"all_reduce 2": curve},
  )
  device = perfmodel.Device(
    name="here",
    matmul_flops_per_s={"float32": 1e12},
    vector_flops_per_s=1e11,
    memory_rate=perfmodel.gbyte_per_s(50),
    memory_bytes=16e9,
    kernel_s=1e-6,
    measured={"elementwise": curve},
  )
  platform = perfmodel.Platform(
    name="platform",
    device=device,
    to_host=link,
    from_host=link,
    axes=(perfmodel.Axis(name="data", workers=2, link=link),),
    sources={"device.kernel_s": "assumed"},
  )
  return json.dumps(perfmodel.platform_to_dict(platform)).encode()


def _explain_platform(whole: bytes, damaged: bytes, value: Any) -> str | None:
  found = perfmodel.platform_to_dict(value)
  wanted = _read_strictly(damaged)
  if _is_part(wanted, _to_pairs(found)):
    return None
  return f"got {found}"


def _is_part(wanted: Any, found: Any) -> bool:
  """Returns whether a value is what was read; defaults may be added."""
  if isinstance(wanted, dict):
    names = [name for name, _ in wanted[""]]
    if not isinstance(found, dict) or len(set(names)) < len(names):
      return False
    held = dict(found[""])
    return all(k in held and _is_part(v, held[k]) for k, v in wanted[""])
  if isinstance(wanted, list):
    if not isinstance(found, list) or len(wanted) != len(found):
      return False
    return all(map(_is_part, wanted, found))
  return type(wanted) is type(found) and wanted == found


# One value of each type that JSON has, and nested ones.
_OTHERS: tuple[Any, ...] = (
  *(None, True, 7, 0.5, "text"),
  *([], [["a", 1]], {"a": 1}),
)


def _swap_json(random: Random, tree: Any, allowed: Callable) -> str:
  """Gives a random value of a tree another type, and returns its path."""
  paths = list(_list_paths(tree))
  while True:
    *parents, last = paths[int(random.integers(len(paths)))]
    inner = tree
    for key in parents:
      inner = inner[key]
    new = _OTHERS[int(random.integers(len(_OTHERS)))]
    if not allowed(last, inner[last], new):
      inner[last] = new
      return f"{[*parents, last]} becomes {new!r}"


def _list_paths(tree: Any, path: tuple = ()) -> Iterator[tuple]:
  items = tree.items() if isinstance(tree, dict) else enumerate(tree)
  for key, value in items:
    yield (*path, key)
    if isinstance(value, dict | list):
      yield from _list_paths(value, (*path, key))


def _swap_platform(random: Random, whole: bytes) -> tuple[bytes, str]:
  def is_allowed(name: Any, old: Any, new: Any) -> bool:
    if name in ("to_host", "from_host") and new is None:
      return True  # A device without a link to a host.
    both = isinstance(old, int | float) and isinstance(new, int | float)
    return type(old) is type(new) or (
      both and not isinstance(old, bool) and not isinstance(new, bool)
    )

  tree = json.loads(whole)
  what = _swap_json(random, tree, is_allowed)
  return json.dumps(tree).encode(), what


def _write_rows(random: Random) -> bytes:
  value, baseline, ratio, noise = (float(x) for x in random.normal(size=4))
  key, place = ("train_digits", "int8", "loss"), ("here", "0.1")
  row = Row(*key, value, "1", baseline, ratio, noise, *place)
  rows = [row, row._replace(case="ü", value="why", noise=None)]
  return "".join(json.dumps(r._asdict()) + "\n" for r in rows).encode()


def _explain_rows(whole: bytes, damaged: bytes, value: Any) -> str | None:
  lines = [line for line in damaged.split(b"\n") if line.strip()]
  wanted = [_read_strictly(line) for line in lines]
  found = [_to_pairs(row._asdict()) for row in value]
  same = all(map(_is_part, wanted, found)) and len(wanted) == len(found)
  return None if same else f"got {value}"


def _swap_row(random: Random, whole: bytes) -> tuple[bytes, str]:
  def is_allowed(name: Any, old: Any, new: Any) -> bool:
    kinds = {type(old)}
    if name in ("value", "baseline", "ratio", "noise"):
      kinds = {int, float, str if name == "value" else type(None)}
    return type(new) in kinds

  line, *others = whole.split(b"\n")
  row = json.loads(line)
  what = _swap_json(random, row, is_allowed)
  return b"\n".join([json.dumps(row).encode(), *others]), what


def _make_arrays(random: Random) -> dict[str, np.ndarray]:
  shape = (int(random.integers(1, 4)), 4, 4, 3)
  return {
    "x_train": random.integers(0, 256, shape).astype(np.uint8),
    "y_train": random.integers(0, 10, shape[0]),
    "x_test": random.integers(0, 256, (2, *shape[1:])).astype(np.uint8),
    "y_test": random.integers(0, 10, 2),
  }


def _write_arrays(arrays: dict[str, np.ndarray]) -> bytes:
  stream = io.BytesIO()
  np.savez(stream, **arrays)  # type: ignore[arg-type]
  return stream.getvalue()


def _swap_array(random: Random, whole: bytes) -> tuple[bytes, str]:
  with np.load(io.BytesIO(whole)) as archive:
    arrays = dict(archive)
  name = list(arrays)[int(random.integers(4))]
  old = arrays[name]
  swaps: dict[str, Callable[[], np.ndarray]] = {
    "float64": lambda: old.astype(np.float64),
    "objects": lambda: np.array([{}] * len(old), object),
    "text": lambda: old.astype(str),
    "an image more": lambda: np.concatenate([old, old[:1]]),
    "no image": lambda: old[:0],
    "a scalar": lambda: old.reshape(-1)[0],
    "16 bits": lambda: old.astype(np.uint16) + 256,
    "negative": lambda: -old.astype(np.int16) - 1,
  }
  what = list(swaps)[int(random.integers(len(swaps)))]
  arrays[name] = swaps[what]()
  return _write_arrays(arrays), f"{name} becomes {what}"


def _explain_archive(whole: bytes, damaged: bytes, value: Any) -> str | None:
  with np.load(io.BytesIO(whole)) as archive:
    wanted = [archive[name] for name in archive]
  found = [*value.train, *value.test]
  same = all(map(np.array_equal, found, wanted))
  return None if same else "other arrays than those saved"


def _write_records(random: Random) -> bytes:
  rows = random.integers(0, 256, (int(random.integers(1, 3)), 3073))
  rows[:, 0] %= 10
  return rows.astype(np.uint8).tobytes()


def _read_records(path: Path) -> Any:
  path.with_name("test_batch.bin").write_bytes(bytes(3073))
  return image_files.load_cifar10(path.parent)


def _explain_records(whole: bytes, damaged: bytes, value: Any) -> str | None:
  rows = np.frombuffer(damaged, np.uint8).reshape(-1, 3073)
  pixels = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
  same = np.array_equal(value.train.pixels, pixels)
  same &= np.array_equal(value.train.labels, rows[:, 0])
  if same and (rows[:, 0] < 10).all():
    return None
  return f"labels {value.train.labels}, of the file {rows[:, 0]}"


def _write_image(random: Random) -> bytes:
  pixels = random.integers(0, 256, (6, 6, 3)).astype(np.uint8)
  stream = io.BytesIO()
  Image.fromarray(pixels).save(stream, "png")
  return stream.getvalue()


def _swap_image(random: Random, whole: bytes) -> tuple[bytes, str]:
  pixels = random.integers(0, 65536, (6, 6)).astype(np.uint16)
  stream = io.BytesIO()
  Image.fromarray(pixels).save(stream, "png")
  return stream.getvalue(), "16 bits"


def _read_image(path: Path) -> np.ndarray:
  folder = path.parents[2]
  held_out = folder / "val" / "class" / "valid.png"
  held_out.parent.mkdir(parents=True)
  Image.new("L", (6, 6)).save(held_out)
  return image_files.load_image_folder(folder, 6).train.pixels[0]


def _explain_png(whole: bytes, damaged: bytes, value: Any) -> str | None:
  with Image.open(io.BytesIO(whole)) as image:
    same = np.array_equal(value, np.asarray(image))
  return None if same else "other pixels than those saved"


KINDS = (
  Kind(
    "platform.json",
    _write_platform,
    lambda path: perfmodel.load_platform(path),
    _explain_platform,
    _swap_platform,
  ),
  Kind(
    "rows.jsonl",
    _write_rows,
    lambda path: records.read_rows(path),
    _explain_rows,
    _swap_row,
  ),
  Kind(
    "arrays.npz",
    lambda random: _write_arrays(_make_arrays(random)),
    lambda path: image_files.load_cifar10(path),
    _explain_archive,
    _swap_array,
  ),
  Kind("data_batch_1.bin", _write_records, _read_records, _explain_records),
  Kind(
    "train/class/image.png",
    _write_image,
    _read_image,
    _explain_png,
    _swap_image,
  ),
)
