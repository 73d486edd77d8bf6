"""Tests of the table of commands in experiments/README.md."""

import re

from tests.paths import ROOT

FOLDER = ROOT / "experiments"
LINES = [
  [cell.strip() for cell in line.strip("| ").split(" | ")]
  for line in (FOLDER / "README.md").read_text().splitlines()
  if line.startswith("| `")
]
COMMANDS = [re.match(r"`([\w.]+)`", line[0])[1] for line in LINES]


def runners():
  """Names of all modules that can be started as commands."""
  for path in FOLDER.rglob("*.py"):
    text = path.read_text()
    if "shared_flags.run_main(main)" in text:
      parts = path.relative_to(FOLDER).with_suffix("").parts
      yield ".".join(part for part in parts if part != "__main__")


def test_every_runner_is_in_the_table_and_every_command_exists():
  loose = ["tables", "figures"]  # They read rows and write none.
  assert sorted(COMMANDS) == sorted([*runners(), *loose])
  for name in loose:
    assert '__name__ == "__main__"' in (FOLDER / f"{name}.py").read_text()


def test_rows_and_pages_of_the_table_exist():
  for line in LINES:
    names = re.findall(r"`([\w*]+)`", line[-2])
    for name in names:
      assert list((ROOT / "docs" / "results").glob(f"{name}.jsonl")), (
        f"no rows {name}"
      )
    (page,) = re.findall(r"\]\((.+)\)", line[-1])
    assert (FOLDER / page).exists(), f"no page {page}"


def test_every_file_of_rows_is_in_the_table():
  named = [n for line in LINES for n in re.findall(r"`([\w*]+)`", line[-2])]
  folder = ROOT / "docs" / "results"
  listed = {path for name in named for path in folder.glob(f"{name}.jsonl")}
  assert listed == set(folder.glob("*.jsonl"))
