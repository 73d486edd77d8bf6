"""Names the folders that tests read."""

import pathlib

ROOT = pathlib.Path(__file__).parents[1]
