"""Command line of the library: `jaxmotion --help`, or `python -m jaxmotion`."""

from jaxmotion.command._main import main as main
