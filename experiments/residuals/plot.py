"""Plots of device memory: of modes by network, of policies by step time."""

import math
import os
from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from experiments.common import figures, records
from experiments.residuals import policies, tables

_COLUMNS = 3
_SIZE = 3.4  # Inches of one plot.
_COLORS = {"jax_block": "tab:orange", "jax_whole": "tab:brown"}
_MARKS = "osD^v<>pPXhH*d8"


def save_plot(
  rows: Sequence[records.Row], path: str | os.PathLike[str]
) -> None:
  """Draws the temporaries of each mode relative to plain, by network."""
  shares = {
    tuple(row.case.rsplit("/", 1)): row.ratio
    for row in rows
    if row.metric == "temp_bytes" and row.ratio is not None
  }
  nets = list(dict.fromkeys(net for net, _ in shares))
  modes = list(dict.fromkeys(mode for _, mode in shares))
  figure = figures.make_figure(9, 1 + 0.8 * len(nets))
  axes = figure.add_subplot()
  height = 0.6 / max(1, len(modes))
  for i, mode in enumerate(modes):
    known = [j for j, net in enumerate(nets) if (net, mode) in shares]
    # Points: the length of a bar means nothing on a logarithmic axis.
    axes.plot(
      [100 * shares[nets[j], mode] for j in known],
      [j + (i + 0.5) * height - 0.3 for j in known],
      _MARKS[i % len(_MARKS)],
      color=f"C{i % 10}",
      markersize=5,
      label=mode.replace("_", " "),
    )
  for j in range(1, len(nets)):
    axes.axhline(j - 0.5, color="lightgray", linewidth=0.8)
  axes.set_yticks(range(len(nets)), nets)
  axes.invert_yaxis()
  axes.set_xscale("log")
  axes.set_xlabel("temporaries on the device, % of plain (logarithmic)")
  axes.set_title("Device memory by mode: compiled, not run")
  figure.legend(loc="outside right upper", fontsize="small")
  axes.grid(alpha=0.3, axis="x")
  figures.save_figure(figure, path)


def save_frontiers(
  rows: Sequence[records.Row], path: str | os.PathLike[str]
) -> None:
  """Draws one plot for each model, with the legend beside all of them."""
  # Stock policies are points. Ours is a line over those of its budgets that no
  # other one beats in both bytes and time; the others are small points.
  groups = tables.group_points(rows)
  lines = math.ceil(len(groups) / _COLUMNS)
  columns = min(_COLUMNS, len(groups))
  figure = figures.make_figure(_SIZE * columns + 3, _SIZE * lines + 0.6)
  marks = _choose_marks(groups)
  handles: dict[str, Artist] = {}
  for i, (model, points) in enumerate(groups.items(), 1):
    axes = figure.add_subplot(lines, columns, i)
    handles |= _draw_model(axes, points, marks)
    axes.set_title(model, fontsize="medium")
  figure.suptitle("Step time against memory: compiled for a GPU, not run")
  figure.supxlabel("temporaries, % of plain (logarithmic)")
  figure.supylabel("step, ms (predicted)")
  figure.legend(
    list(handles.values()),
    [name.replace("_", " ") for name in handles],
    loc="outside right upper",
    fontsize="small",
  )
  figures.save_figure(figure, path)


def _choose_marks(groups: dict[str, tables.Points]) -> dict[str, str]:
  """Returns a mark for every kind of stock policy."""
  # Policies of one name alone share a mark: names differ between models.
  found = dict.fromkeys(
    _kind(p)
    for points in groups.values()
    for p in points
    if not policies.is_ours(p)
  )
  return {kind: _MARKS[i % len(_MARKS)] for i, kind in enumerate(found)}


def _kind(policy: str) -> str:
  for part in ("_names_but_", "_name_"):
    if part in policy:
      return policy.partition(part)[0] + part.rstrip("_")
  return policy


def _draw_model(
  axes: Axes, points: tables.Points, marks: dict[str, str]
) -> dict[str, Artist]:
  """Draws the points of a model; returns what the legend shows, by label."""
  handles: dict[str, Artist] = {}

  whole = points.get("plain", {}).get("temp_bytes", 0) or 1.0

  def place(policy: str) -> tuple[float, float]:
    found = points[policy]
    return 100 * found["temp_bytes"] / whole, found["step_ms_predicted"]

  for policy in points:
    if policies.is_ours(policy):
      continue
    kind = _kind(policy)
    color = next((c for k, c in _COLORS.items() if kind.startswith(k)), "black")
    (handles[kind],) = axes.plot(
      *place(policy), marks[kind], color=color, alpha=0.7, markersize=6
    )
  ours = sorted(
    place(p) for p in points if policies.is_ours(p) and policies.is_exact(p)
  )
  if ours:
    axes.plot(*zip(*ours, strict=True), ".", color="tab:blue", markersize=4)
    (handles["ours, lossless"],) = axes.plot(
      *zip(*_find_best(ours), strict=True), "o-", color="tab:blue", markersize=5
    )
  for policy, color in (("ours_8bits", "tab:green"), ("ours_4bits", "tab:red")):
    if policy in points:
      label = policy.replace("_", ", ").replace("bits", " bits")
      (handles[label],) = axes.plot(
        *place(policy), "*", color=color, markersize=11
      )
  axes.set_xscale("log")
  axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
  axes.xaxis.set_major_formatter("{x:g}")
  axes.xaxis.set_minor_formatter(NullFormatter())
  low, high = axes.get_xlim()
  axes.set_xlim(low / 1.2, high * 1.2)
  axes.grid(alpha=0.3)
  axes.tick_params(labelsize="small")
  return handles


def _find_best(places: list[tuple[float, float]]) -> list[tuple[float, float]]:
  """Returns the places that no other one beats in both coordinates.

  >>> _find_best([(1, 9), (2, 9), (2, 5), (3, 7)])
  [(1, 9), (2, 5)]
  """
  found: list[tuple[float, float]] = []
  for place in places:
    if not found or place[1] < found[-1][1]:
      found.append(place)
  return found
