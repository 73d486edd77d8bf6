import numpy as np
import pytest
from ml_collections import ConfigDict
from sklearn import datasets

from experiments.common.console import JobError
from experiments.data import images as data_images

RNG = np.random.default_rng(0)


def test_digits_are_split_two_to_one_without_overlap():
  data = data_images.load_digits()
  assert data.train.pixels.shape == (1198, 8, 8, 1)
  assert data.test.pixels.shape == (599, 8, 8, 1)
  assert set(data.train.labels) == set(data.test.labels) == set(range(10))
  # Every digit of the file is on exactly one side.
  everything = np.concatenate([data.train.pixels, data.test.pixels])
  pixels = datasets.load_digits().data.reshape(-1, 8, 8, 1) * 16
  expected = np.minimum(pixels, 255).astype(np.uint8)
  assert sorted(map(bytes, everything)) == sorted(map(bytes, expected))


def test_digits_split_is_the_same_every_time():
  first, second = data_images.load_digits(), data_images.load_digits()
  np.testing.assert_array_equal(first.test.pixels, second.test.pixels)


def test_photographs_are_crops_at_four_rotations():
  data = data_images.load_photographs()
  assert data.train.pixels.shape == (8000, 32, 32, 3)
  assert data.test.pixels.shape == (4000, 32, 32, 3)
  assert data.classes == 8
  for images in data[:2]:
    assert (np.bincount(images.labels) == len(images.labels) / 8).all()
  photographs = datasets.load_sample_images().images
  for label, pixels in zip(
    data.test.labels[::501], data.test.pixels[::501], strict=True
  ):
    photograph, turn = divmod(int(label), 4)
    upright = np.rot90(pixels, -turn)
    assert _places(photographs[photograph], upright)


def test_no_pixel_of_a_photograph_is_on_both_sides():
  data = data_images.load_photographs()
  photographs = datasets.load_sample_images().images
  seen = []
  for images in data[:2]:
    mask = np.zeros((2, *photographs[0].shape[:2]), int)
    upright = images.labels % 4 == 0
    found = zip(images.labels[upright], images.pixels[upright], strict=True)
    for label, pixels in found:
      photograph = int(label) // 4
      for i, j in _places(photographs[photograph], pixels):
        mask[photograph, i : i + 32, j : j + 32] = 1
    seen.append(mask)
  assert not (seen[0] & seen[1]).any()
  assert seen[0].any() and seen[1].any()


def _places(photograph, crop):
  """Where a crop is in a photograph, on the grid that crops are cut on."""
  corners = (photograph[:-31:8, :-31:8] == crop[0, 0]).all(axis=-1)
  return [
    (i, j)
    for i, j in 8 * np.argwhere(corners)
    if (photograph[i : i + 32, j : j + 32] == crop).all()
  ]


def test_resizing_keeps_what_there_is():
  data = data_images.load_digits()
  bigger = data_images.resize_images(data, 32)
  assert bigger.train.pixels.shape == (1198, 32, 32, 1)
  np.testing.assert_array_equal(bigger.test.labels, data.test.labels)
  # The mean over each 4 x 4 is near the pixel that it was made of.
  means = bigger.test.pixels.reshape(-1, 8, 4, 8, 4).mean(axis=(2, 4))
  correlation = np.corrcoef(
    means.ravel(), data.test.pixels.astype(float).ravel()
  )
  assert correlation[0, 1] > 0.95
  assert data_images.resize_images(data, 8).train is data.train


def test_data_dir_must_be_given():
  with pytest.raises(FileNotFoundError, match=r"`config.data_dir` must"):
    data_images.load_images(ConfigDict({"data": "cifar10", "data_dir": ""}))


def test_unknown_data_is_named():
  with pytest.raises(JobError, match=r"got 'mnist'"):
    data_images.load_images(ConfigDict({"data": "mnist", "data_dir": ""}))


def test_an_epoch_sees_every_example_once():
  batches = [data_images.batch_indices(10, 5, seed=1, step=s) for s in range(4)]
  first, second = np.concatenate(batches[:2]), np.concatenate(batches[2:])
  assert sorted(first) == sorted(second) == list(range(10))
  assert first.tolist() != second.tolist()


def test_batches_depend_on_seed_and_step_alone():
  late = data_images.batch_indices(1000, 10, seed=3, step=250)
  for step in range(5):
    data_images.batch_indices(1000, 10, seed=4, step=step)
  np.testing.assert_array_equal(
    late, data_images.batch_indices(1000, 10, seed=3, step=250)
  )
  assert late.tolist() != data_images.batch_indices(1000, 10, 4, 250).tolist()


def test_batch_cannot_be_larger_than_the_data():
  with pytest.raises(JobError, match=r"`size` must be .*got 11"):
    data_images.batch_indices(10, 11, seed=0, step=0)
