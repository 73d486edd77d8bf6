"""Agreement of processes on what they train, before the first step.

Processes run the same program, but each reads its own arguments. With other
parameters, learning rates or codecs they would train on without a word.
"""

import functools
import itertools
import json
import re
import types
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxmotion import core
from jaxmotion.codecs import Codec
from jaxmotion.core import PyTree
from jaxmotion.transforms import _states
from jaxmotion.transforms._step._scheme import Scheme, Workers

_REMEDIES = {
  "params": "make them from one seed, or load one file",
  "model_state": "make it from one seed, or load one file",
  "scheme": "give all processes the same options",
}
_PLAIN = bool | int | float | complex | str | bytes | np.generic | None
# Functions of others may hold what each process has for itself, such as a file.
_ROOMS = ("optax", "jaxmotion")

# By argument and by name of a part of it: what parts of that name are.
_Entries = dict[str, dict[str, list[str]]]


def check_processes(
  workers: Workers, scheme: Scheme, params: PyTree, model_state: PyTree
) -> None:
  """Raises unless all processes start from the same parameters and scheme."""
  # All processes of the workers call this. model_state: the one that all
  # workers share, or None.
  given = {"params": params, "model_state": model_state}
  # One device of each process.
  devices = {d.process_index: d for d in workers.mesh.devices.flat}
  is_traced = any(
    isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct)
    for x in jax.tree.leaves(given)
  )
  if len(devices) == 1 or is_traced:
    return
  entries: _Entries = {}

  def add_entry(argument: str, name: str, text: str) -> None:
    entries.setdefault(argument, {}).setdefault(name, []).append(text)

  for argument, tree in given.items():
    for path, x in core.named_leaves(tree):
      add_entry(argument, path or "the array", _describe_leaf(x))
  for name, text in _list_settings("", scheme, set()):
    add_entry("scheme", name, text)
  state = jax.eval_shape(lambda p: scheme.start(workers, p)[1], params)
  for node in _states.find_exchanges(state):
    text = f"{node.made_for}, {node.made_for.specs}"
    add_entry("scheme", "opt_state/made_for", text)
  for path, x in core.named_leaves(state):
    add_entry("scheme", f"opt_state/{path}", f"{x.dtype}{list(x.shape)}")
  # Where objects of a process are is its own.
  structure = re.sub(r" at 0x\w+", "", str(jax.tree.structure(state)))
  add_entry("scheme", "opt_state", structure)
  texts = _gather_texts(json.dumps(entries), list(devices.values()))
  if texts is not None:
    _raise_difference(dict(zip(devices, map(json.loads, texts), strict=True)))


def _describe_leaf(x: Any) -> str:
  """Returns dtype, shape and checksum of an array, or of any number."""
  if not core.is_local(x):
    if not x.is_fully_replicated:
      return f"{x.dtype}{list(x.shape)}"
    x = x.addressable_data(0)
  if core.is_key(x):
    x = jax.random.key_data(x)
  x = np.asarray(x)
  words = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
  return f"{x.dtype}{list(x.shape)} of checksum {zlib.crc32(words.data):08x}"


def _list_settings(
  name: str, x: Any, seen: set[int]
) -> Iterator[tuple[str, str]]:
  """Walks a scheme; yields its numbers, strings and codecs with their names."""
  if isinstance(x, Codec | _PLAIN):
    yield name, repr(x)
    return
  if id(x) in seen:
    return
  seen.add(id(x))
  if isinstance(x, np.ndarray | jax.Array):
    yield name, _describe_leaf(x)
    return
  for part, value in _list_parts(name, x):
    yield from _list_settings(part, value, seen)


def _list_parts(name: str, x: Any) -> Iterator[tuple[str, Any]]:
  """Yields the parts of an object: fields, items, or variables of a closure."""
  kind = type(x).__name__.lstrip("_")
  if isinstance(x, Mapping):
    for key in sorted(x, key=repr):
      yield f"{name}[{key!r}]", x[key]
  elif hasattr(x, "_fields"):
    yield from ((f"{kind}.{key}", getattr(x, key)) for key in x._fields)
  elif isinstance(x, list | tuple):
    yield from ((name, value) for value in x)
  elif isinstance(x, functools.partial):
    yield from ((name, value) for value in (x.func, x.args, x.keywords))
  elif isinstance(x, types.MethodType):
    yield from ((name, value) for value in (x.__self__, x.__func__))
  elif not _is_ours(x):
    return
  elif hasattr(x, "__wrapped__"):
    yield name, x.__wrapped__
  elif isinstance(x, types.FunctionType):
    outer = x.__qualname__.split(".<locals>")[0]
    cells = zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)
    for key, cell in cells:
      try:
        yield f"{outer}.{key}", cell.cell_contents
      except ValueError:  # A name that is not bound yet.
        continue
  elif not isinstance(x, type):
    held = getattr(x, "__dict__", {})
    yield from ((f"{kind}.{key}", value) for key, value in held.items())


def _is_ours(x: Any) -> bool:
  """Returns whether an object or function is of optax or of this package."""
  of = x if hasattr(x, "__qualname__") else type(x)
  return (getattr(of, "__module__", None) or "").split(".")[0] in _ROOMS


def _gather_texts(text: str, devices: list[jax.Device]) -> list[str] | None:
  """Returns the texts of all processes, or None if they are the same."""
  data = text.encode()
  sums = np.array([zlib.crc32(data), len(data)], np.uint32)
  rows = _gather_rows(sums, devices)
  if (rows == rows[0]).all():
    return None
  lengths = rows[:, 1].tolist()
  padded = np.zeros(-(-max(lengths) // 4) * 4, np.uint8)
  padded[: len(data)] = np.frombuffer(data, np.uint8)
  texts = _gather_rows(padded.view(np.uint32), devices)
  return [
    row.tobytes()[:length].decode()
    for row, length in zip(texts, lengths, strict=True)
  ]


def _gather_rows(row: np.ndarray, devices: list[jax.Device]) -> np.ndarray:
  """Gathers uint32[n] of each process to uint32[processes, n] on all."""
  mesh = Mesh(np.array(devices), ("process",))
  rows = jax.make_array_from_callback(
    (len(devices), row.size),
    NamedSharding(mesh, P("process")),
    lambda _: row[None],
  )
  with core.without_context_mesh():
    copy = jax.jit(lambda a: a, out_shardings=NamedSharding(mesh, P()))
    return np.asarray(copy(rows).addressable_data(0))


def _raise_difference(entries: dict[int, _Entries]) -> None:
  """Raises an error that names the first entry in which processes differ."""
  (first, own), *others = entries.items()
  # Arrays come first, because a leaf that only one process has also changes
  # its state.
  for (process, given), (argument, remedy) in itertools.product(
    others, _REMEDIES.items()
  ):
    groups = own.get(argument, {}), given.get(argument, {})
    for name in groups[0] | groups[1]:
      values = [group.get(name, []) for group in groups]
      for pair in itertools.zip_longest(*values, fillvalue="nothing"):
        if pair[0] != pair[1]:
          raise ValueError(
            f"`{argument}` must be equal on all processes, got {name} = "
            f"{pair[0]:.400} on process {first}, and {pair[1]:.400} on process "
            f"{process}: {remedy}."
          )
