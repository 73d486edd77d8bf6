import zlib

import numpy as np
import pytest
from ml_collections import ConfigDict

from experiments.common.console import JobError
from experiments.data import text as data_text


def text_config(folder, train_bytes=10_000, test_bytes=10_000):
  return ConfigDict(
    {
      "data": "stdlib",
      "data_dir": str(folder),
      "train_bytes": train_bytes,
      "test_bytes": test_bytes,
    }
  )


@pytest.fixture
def sources(tmp_path):
  """Forty modules, of which some hash into the held-out tenth."""
  for i in range(40):
    (tmp_path / f"m{i:02}.py").write_text(f"# module {i:02}\n")
  return tmp_path


def test_sources_are_sorted_and_leave_tests_out(tmp_path):
  for name in (
    "b.py",
    "a/z.py",
    "a.py",
    "test/t.py",
    "a/tests/t.py",
    "site-packages/s.py",
    "_sysconfigdata_x.py",
    "notes.txt",
  ):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(name)
  names = [
    path.relative_to(tmp_path).as_posix()
    for path in data_text.list_sources(tmp_path)
  ]
  assert names == ["a.py", "a/z.py", "b.py"]


def test_split_keeps_files_whole_and_apart_and_limits_cut_it(sources):
  config = text_config(sources)
  data = data_text.load_text(config)
  sides = [
    set(side.tobytes().decode().splitlines())
    for side in (data.train, data.test)
  ]
  assert sides[0] | sides[1] == {f"# module {i:02}" for i in range(40)}
  assert not sides[0] & sides[1]
  assert len(sides[1]) < len(sides[0])
  cut = data_text.load_text(text_config(sources, train_bytes=20, test_bytes=5))
  assert cut.train.tobytes() == data.train.tobytes()[:20]
  assert cut.test.tobytes() == data.test.tobytes()[:5]
  before = data_text.corpus_sha256(data)
  assert before == data_text.corpus_sha256(data_text.load_text(config))
  (sources / "m00.py").write_text("# changed\n")
  assert before != data_text.corpus_sha256(data_text.load_text(config))


def test_standard_library_is_there():
  data = data_text.load_text(text_config("", 50_000, 50_000))
  assert data.train.size == data.test.size == 50_000
  assert b"import" in data.train.tobytes()


def test_unknown_and_missing_data_are_named(tmp_path):
  config = text_config(tmp_path)
  with pytest.raises(FileNotFoundError, match=r"\*.py files for the train"):
    data_text.load_text(config)
  config.data = "digits"
  with pytest.raises(JobError, match=r"got 'digits'"):
    data_text.load_text(config)


def test_zlib_bits_are_those_of_the_stream():
  text = np.frombuffer(b"abc" * 100, np.uint8)
  stream = zlib.compress(b"abc" * 100, 9)
  assert data_text.zlib_bits_per_byte(text) * 300 == 8 * len(stream)


def test_windows_predict_every_byte_once():
  text = np.arange(14, dtype=np.uint8)
  windows = data_text.cut_windows(text, 4)
  assert windows.tolist() == [
    [0, 1, 2, 3, 4],
    [4, 5, 6, 7, 8],
    [8, 9, 10, 11, 12],
  ]
  with pytest.raises(JobError, match=r"window of 14 bytes, got 14"):
    data_text.cut_windows(text, 14)


def test_random_windows_depend_on_seed_and_step_alone():
  text = np.arange(200, dtype=np.uint8)
  one = data_text.draw_windows(text, 5, 3, seed=1, step=7)
  data_text.draw_windows(text, 5, 3, seed=2, step=8)
  again = data_text.draw_windows(text, 5, 3, seed=1, step=7)
  np.testing.assert_array_equal(one, again)
  np.testing.assert_array_equal(one - one[:, :1], [[0, 1, 2, 3, 4, 5]] * 3)
  assert one.tolist() != data_text.draw_windows(text, 5, 3, 1, 8).tolist()
  text = np.arange(7, dtype=np.uint8)
  seen = data_text.draw_windows(text, 5, 200, seed=0, step=0)
  assert (seen.min(), seen.max()) == (0, 6)  # Both ends are reached.
