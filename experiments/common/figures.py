"""Figures of runners: made without a screen, at double resolution."""

import io
import os
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

_DPI = 200  # Twice what a page shows.
# Lines, text and their soft edges need no more, and take a third of the bytes.
_COLORS = 64


def make_figure(width: float, height: float) -> Figure:
  """Returns an empty figure, in which nothing covers anything else."""
  figure = Figure(figsize=(width, height), layout="constrained")
  FigureCanvasAgg(figure)
  return figure


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
  """Writes a figure to a file, whose folder is made if it is not there."""
  # A PNG gets a palette of 64 colors.
  path = Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  if path.suffix != ".png":
    figure.savefig(path, dpi=_DPI)
    return
  drawn = io.BytesIO()
  figure.savefig(drawn, dpi=_DPI)
  image = Image.open(drawn).convert("RGB")
  image.quantize(_COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
