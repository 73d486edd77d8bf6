"""Runs the command line: `jaxmotion`, or `python -m jaxmotion`."""

import sys


def main() -> int:
  """Runs the command of `sys.argv` and returns the exit status."""
  try:
    # JAX takes seconds to import. An interrupt then must not be a traceback.
    from jaxmotion.command import main as run_command

    return run_command()
  except KeyboardInterrupt:
    print("\njaxmotion: Stopped by an interrupt.", file=sys.stderr)
    return 130


if __name__ == "__main__":
  sys.exit(main())
