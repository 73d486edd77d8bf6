"""Runs the command line: `python -m jaxmotion`."""

import sys

from jaxmotion.command import main

if __name__ == "__main__":
  sys.exit(main())
