"""Groups of devices that a collective of a compiled program runs over."""

import itertools
import math
import re

import numpy as np
from jax.sharding import Mesh

from jaxmotion.wire import _ledger

_PAIRS = re.compile(r"source_target_pairs=\{(.*?\})\}")
_LISTED = re.compile(r"replica_groups=\{(\{.*?\})?\}")
_IOTA = re.compile(
  r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
)
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")

_Groups = frozenset[frozenset[int]]


def parse_group(
  attributes: str, devices: int, mesh: Mesh | None
) -> tuple[tuple[str, ...], int]:
  """Returns the mesh axes, where they are known, and the group size."""
  # XLA writes groups in four forms: pairs of a permutation, an iota, a named
  # mesh, or a list of lists. Which one depends on the partitioner.
  if pairs := _PAIRS.search(attributes):
    numbers = re.findall(r"\{(\d+),(\d+)\}", pairs[1])
    return (), _ledger.permuted_workers((int(a), int(b)) for a, b in numbers)
  if named := _MESH.search(attributes):
    return _parse_mesh_group(*named.groups())
  if iota := _IOTA.search(attributes):
    groups = _expand_iota(*iota.groups())
  elif listed := _LISTED.search(attributes):
    rows = re.findall(r"\{([\d,]*)\}", listed[1] or "")
    groups = frozenset(frozenset(_integers(row)) for row in rows)
  else:
    raise ValueError(
      f"`compiled` must state its replica groups, got {attributes!r}."
    )
  if not groups:
    groups = frozenset([frozenset(range(devices))])
  workers = max(len(group) for group in groups)
  return () if mesh is None else _find_axes(groups, mesh), workers


def _integers(text: str) -> list[int]:
  return [int(n) for n in text.split(",") if n]


def _expand_iota(shape: str, dims: str, order: str | None) -> _Groups:
  """Returns the groups of devices, of which the text has the layout."""
  sizes = _integers(dims)
  ids = np.arange(math.prod(sizes)).reshape(sizes)
  if order:
    ids = ids.transpose(_integers(order))
  rows = ids.reshape(-1, _integers(shape)[-1])
  return frozenset(frozenset(row.tolist()) for row in rows)


def _find_axes(groups: _Groups, mesh: Mesh) -> tuple[str, ...]:
  """Returns the axes of the mesh that make these groups, or ()."""
  sizes = mesh.devices.shape
  ids = np.arange(mesh.size).reshape(sizes)
  axes = [i for i, n in enumerate(sizes) if n > 1]
  for count in range(1, len(axes) + 1):
    for chosen in itertools.combinations(axes, count):
      last = np.moveaxis(ids, chosen, range(-count, 0))
      rows = last.reshape(-1, math.prod(sizes[i] for i in chosen))
      if groups == frozenset(frozenset(row.tolist()) for row in rows):
        return tuple(mesh.axis_names[i] for i in chosen)
  return ()


def _parse_mesh_group(mesh: str, group: str) -> tuple[tuple[str, ...], int]:
  sizes = {name: int(n) for name, n in re.findall(r"'([^']*)'=(\d+)", mesh)}
  # A part of an axis is written with its own size: 'data':(2)4.
  parts = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", group)
  workers = math.prod(int(part) if part else sizes[n] for n, part in parts)
  names = tuple(name for name, _ in parts)
  # Shardy invents names like axis_0 where it has lost the mesh: no axis.
  invented = any(re.fullmatch(r"axis_\d+", name) for name in names)
  return () if invented else names, workers
