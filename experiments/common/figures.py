"""Figures of runners: made without a screen, at double resolution."""

import os
import pathlib

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_DPI = 200  # Twice what a page shows.


def make_figure(width: float, height: float) -> Figure:
  """Returns an empty figure, in which nothing covers anything else.

  Args:
    width: inches.
    height: inches.
  """
  figure = Figure(figsize=(width, height), layout="constrained")
  FigureCanvasAgg(figure)
  return figure


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
  """Writes a figure to a file, whose folder is made if it is not there.

  Args:
    figure: the figure.
    path: file of the image; its suffix chooses the format.
  """
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=_DPI)
