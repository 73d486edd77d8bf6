import pathlib

import numpy as np
import pytest
from PIL import Image

from experiments.common.files import FileError
from experiments.data import image_files

RNG = np.random.default_rng(0)
LABELS = [7, 0, 9]  # Of the images held out.


def make_records(count):
  """CIFAR-10 records: pixels, labels, and the bytes of a binary file."""
  pixels = RNG.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
  labels = RNG.integers(0, 10, count)
  planes = pixels.transpose(0, 3, 1, 2).reshape(count, -1)
  records = np.concatenate([labels[:, None].astype(np.uint8), planes], axis=1)
  return pixels, labels, records


def save_npz(path, **changed):
  """Writes an archive of 6 and 3 images, some of its arrays changed."""
  pixels, labels, _ = make_records(9)
  arrays = {
    "x_train": pixels[:6],
    "y_train": labels[:6],
    "x_test": pixels[6:],
    "y_test": np.array(LABELS),
  }
  np.savez(path, **(arrays | changed))
  return path


def save_image(path, color):
  path.parent.mkdir(parents=True, exist_ok=True)
  Image.new("RGB", (20, 10), color).save(path)


def test_cifar10_binary_files_are_read_in_order(tmp_path):
  parts = [make_records(n) for n in (3, 2, 4)]
  names = ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin")
  for name, (_, _, records) in zip(names, parts, strict=True):
    records.tofile(tmp_path / name)
  data = image_files.load_cifar10(tmp_path)
  np.testing.assert_array_equal(
    data.train.pixels, np.concatenate([parts[0][0], parts[1][0]])
  )
  np.testing.assert_array_equal(
    data.train.labels, np.concatenate([parts[0][1], parts[1][1]])
  )
  np.testing.assert_array_equal(data.test.pixels, parts[2][0])


def test_cifar10_npz_is_read(tmp_path):
  path = save_npz(tmp_path / "cifar.npz")
  with np.load(path) as archive:
    pixels, labels = archive["x_train"], archive["y_train"]
  save_npz(path, x_train=pixels, y_train=labels[:, None])  # As Keras has it.
  for named in (path, tmp_path):
    data = image_files.load_cifar10(named)
    np.testing.assert_array_equal(data.train.pixels, pixels)
    np.testing.assert_array_equal(data.train.labels, labels)
    assert data.test.pixels.shape == (3, 32, 32, 3)
    assert data.test.labels.tolist() == LABELS


def test_missing_and_cut_files_of_cifar10_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"data_batch_\*.bin or an .npz"):
    image_files.load_cifar10(tmp_path)
  records = make_records(3)[2]
  path = tmp_path / "data_batch_1.bin"
  records.tofile(path)
  with pytest.raises(FileNotFoundError, match=r"test_batch.bin"):
    image_files.load_cifar10(tmp_path)
  records.reshape(-1)[:-1].tofile(path)
  with pytest.raises(ValueError, match=r"data_batch_1.bin.*got 9218 bytes"):
    image_files.load_cifar10(tmp_path)
  records[1, 0] = 10  # Outside the classes.
  records.tofile(path)
  with pytest.raises(FileError, match=r"data_batch_1.bin' must .* 0 to 9, got"):
    image_files.load_cifar10(tmp_path)


def test_npz_without_labels_is_named(tmp_path):
  np.savez(tmp_path / "half.npz", x_train=np.zeros(1), x_test=np.zeros(1))
  with pytest.raises(ValueError, match=r"got no y_train, y_test"):
    image_files.load_cifar10(tmp_path)


@pytest.mark.parametrize("held_out", ["val", "test"])
def test_image_folder_with_splits_is_read(tmp_path, held_out):
  save_image(tmp_path / "train" / "cat" / "a.png", (255, 0, 0))
  save_image(tmp_path / "train" / "dog" / "b.jpg", (0, 255, 0))
  save_image(tmp_path / held_out / "dog" / "c.png", (0, 0, 255))
  (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
  data = image_files.load_image_folder(tmp_path, 8)
  assert data.classes == 2
  assert data.train.pixels.shape == (2, 8, 8, 3)
  assert data.train.labels.tolist() == [0, 1]
  assert data.test.labels.tolist() == [1]
  assert (data.train.pixels[0] == (255, 0, 0)).all()
  assert (data.test.pixels[0] == (0, 0, 255)).all()


def test_plain_image_folder_holds_out_by_path(tmp_path):
  for i in range(40):
    save_image(tmp_path / "ab"[i % 2] / f"{i}.png", (i, 0, 0))
  data = image_files.load_image_folder(tmp_path, 4)
  train, test = (set(s.pixels[:, 0, 0, 0]) for s in (data.train, data.test))
  assert train | test == set(range(40))
  assert not train & test
  assert 2 <= len(test) <= 16  # A fifth of 40, give or take.
  # More files move none of the others to the other side.
  save_image(tmp_path / "a" / "new.png", (200, 0, 0))
  again = image_files.load_image_folder(tmp_path, 4)
  assert set(again.test.pixels[:, 0, 0, 0]) - {200} == test


def test_missing_image_folders_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"got '/nowhere/at/all'"):
    image_files.load_image_folder(pathlib.Path("/nowhere/at/all"), 8)
  with pytest.raises(FileNotFoundError, match=r"class folders of images"):
    image_files.load_image_folder(tmp_path, 8)
  (tmp_path / "train").mkdir()
  with pytest.raises(FileNotFoundError, match=r"val/ or test/ beside train/"):
    image_files.load_image_folder(tmp_path, 8)


# Other types and numbers of them are refused in fuzz/test_files.py.
@pytest.mark.parametrize(
  ("changed", "match"),
  [
    ({"y_train": np.arange(6) + 5}, r"labels of 'train'.* 0 to 9, got 5 to 10"),
    ({"y_test": np.zeros((3, 2), int)}, r"got int64 \(3, 2\)"),
    ({"x_train": np.zeros((6, 48), np.uint8)}, r"pixels of 'train'.*\(6, 48\)"),
    ({"x_test": np.zeros((3, 8, 8, 3), np.uint8)}, r"images of .* one shape"),
    ({"x_test": np.zeros((3, 3, 32, 32), np.uint8)}, r"1 or 3 channels"),
  ],
)
def test_arrays_that_are_no_labeled_images_are_refused(
  tmp_path, changed, match
):
  path = save_npz(tmp_path / "cifar.npz", **changed)
  with pytest.raises(FileError, match=match) as caught:
    image_files.load_cifar10(path)
  assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_damaged_archive_is_named(tmp_path):
  path = save_npz(tmp_path / "cifar.npz")
  whole = path.read_bytes()
  # The header asks for one image less: no checksum is reached by reading it.
  path.write_bytes(whole.replace(b"(6, 32, 32, 3)", b"(5, 32, 32, 3)", 1))
  with pytest.raises(FileError, match=r"cifar.npz' must be an .npz archive"):
    image_files.load_cifar10(path)


def test_two_archives_are_refused(tmp_path):
  for name in ("a.npz", "b.npz"):
    save_npz(tmp_path / name)
  with pytest.raises(FileError, match=r"one .npz file or name one, got a.npz"):
    image_files.load_cifar10(tmp_path)


def save_folder(folder, path="train/a/1.png"):
  """Writes a folder of two images and returns the path of one."""
  save_image(folder / "train" / "a" / "0.png", (1, 2, 3))
  save_image(folder / "val" / "a" / "0.png", (1, 2, 3))
  save_image(folder / path, (4, 5, 6))
  return folder / path


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "webp"])
def test_a_damaged_image_is_named(tmp_path, suffix):
  path = save_folder(tmp_path, f"train/a/1.{suffix}")
  whole = path.read_bytes()
  damaged = [whole[:length] for length in (0, 20, len(whole) * 3 // 4)]
  if suffix == "png":
    at = whole.index(b"IDAT") + 14
    damaged.append(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
  for content in damaged:
    path.write_bytes(content)
    with pytest.raises(FileError, match=rf"1.{suffix}' must be an image"):
      image_files.load_image_folder(tmp_path, 8)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_images_of_8_bits_are_read_in_color(tmp_path, mode):
  suffix = "jpg" if mode == "CMYK" else "png"
  path = save_folder(tmp_path, f"train/a/1.{suffix}")
  Image.new("RGB", (8, 8), (255, 255, 255)).convert(mode).save(path)
  data = image_files.load_image_folder(tmp_path, 8)
  assert (data.train.pixels[1] == 255).all()
