import io
import re

import rich.console

from experiments.common.progress import Display


def shown(terminal):
  console = rich.console.Console(
    file=io.StringIO(), force_terminal=terminal, width=100
  )
  with Display(console, steps=8, runs=1) as display:
    on_step = display.begin_run("int8", 1)
    for done in range(1, 9):
      on_step(done, 1 / done)
    display.end_run("int8", 1, score=97.5, step_ms=4.0)
  return console.file.getvalue()


def test_plain_output_is_a_few_lines_without_control_codes():
  lines = shown(terminal=False).strip().splitlines()
  assert lines == [
    "int8 seed 1  loss 0.5000  step 2/8",
    "int8 seed 1  loss 0.2500  step 4/8",
    "int8 seed 1  loss 0.1667  step 6/8",
    "int8 seed 1  loss 0.1250  step 8/8",
    "int8 seed 1: score 97.500, step 4.0 ms",
  ]


def test_terminal_has_a_live_table_and_a_bar_that_ends_full():
  text = shown(terminal=True)
  assert "\x1b[" in text
  plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
  row = [r for r in plain.splitlines() if r.startswith("int8 seed 1 ")][-2]
  assert row.split() == "int8 seed 1 8 0.1250 97.500 4.0".split()
  last = text.rsplit("int8 seed 1  loss", 1)[1]
  assert "8/8" in last
