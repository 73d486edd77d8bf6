import shutil
import subprocess

import pytest

from experiments.common.manifest import (
  NAME,
  BrokenFileError,
  check_manifest,
  remove_folder,
  write_manifest,
)

FILES = {"a": b"12345", "b/c": b"6", "b/empty": b""}


@pytest.fixture
def sealed(tmp_path):
  """A folder with a manifest."""
  folder = tmp_path / "4"
  for name, content in FILES.items():
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(content)
  write_manifest(folder, "4")
  return folder


def test_an_unchanged_folder_gives_the_checksum_of_every_file(sealed):
  sums = check_manifest(sealed)
  assert sorted(sums) == sorted(FILES)
  assert len(set(sums.values())) == len(FILES)


def test_the_usual_program_reads_a_manifest(sealed):
  program = shutil.which("sha256sum") or shutil.which("gsha256sum")
  assert program
  command = [program, "--check", "--strict", f"4/{NAME}"]
  done = subprocess.run(
    command, cwd=sealed.parent, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines() == [f"4/{name}: OK" for name in FILES]


@pytest.mark.parametrize("name", ["a", "b/c", NAME])
def test_a_flipped_bit_in_any_byte_and_a_cut_are_refused_by_name(sealed, name):
  path = sealed / name
  whole = path.read_bytes()
  broken = [whole[:size] for size in {*range(0, len(whole), 9), len(whole) - 1}]
  for index in range(len(whole)):
    flipped = bytearray(whole)
    flipped[index] ^= 1 << (index * 5 % 8)
    broken.append(bytes(flipped))
  for content in [*broken, whole + b"\n", whole + whole]:
    path.write_bytes(content)
    with pytest.raises(BrokenFileError, match=f"{name} does not match"):
      check_manifest(sealed)
  path.write_bytes(whole)
  check_manifest(sealed)


def test_a_missing_file_is_named(sealed):
  (sealed / "b/empty").unlink()
  with pytest.raises(BrokenFileError, match="b/empty is missing"):
    check_manifest(sealed)


def test_a_file_more_is_named(sealed):
  (sealed / "b/d").write_bytes(b"")
  with pytest.raises(BrokenFileError, match="b/d is not in SHA256SUMS"):
    check_manifest(sealed)


def test_a_folder_without_a_manifest_is_refused(sealed):
  (sealed / NAME).unlink()
  with pytest.raises(BrokenFileError, match="SHA256SUMS: No such file"):
    check_manifest(sealed)


def test_a_folder_with_another_name_is_refused(sealed):
  other = sealed.rename(sealed.parent / "5")
  with pytest.raises(BrokenFileError, match="is of another checkpoint"):
    check_manifest(other)


def test_a_removed_folder_is_gone_and_an_absent_one_is_no_error(sealed):
  remove_folder(sealed)
  assert not sealed.exists()
  remove_folder(sealed)
