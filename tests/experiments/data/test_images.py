import numpy as np
import pytest
from ml_collections import ConfigDict
from sklearn import datasets

from experiments.common.console import JobError
from experiments.data import images as data_images


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


def test_photographs_are_crops_at_four_rotations_of_separate_parts():
  data = data_images.load_photographs()
  assert data.train.pixels.shape == (8000, 32, 32, 3)
  assert data.test.pixels.shape == (4000, 32, 32, 3)
  assert data.classes == 8
  photographs = datasets.load_sample_images().images
  # Where crops are: no pixel of a photograph is on both sides.
  seen = np.zeros((2, 2, *photographs[0].shape[:2]), bool)
  for mask, images in zip(seen, data[:2], strict=True):
    assert (np.bincount(images.labels) == len(images.labels) / 8).all()
    shown = (images.labels % 4 == 0) | (
      np.arange(len(images.labels)) % 501 == 0
    )
    for label, pixels in zip(
      images.labels[shown], images.pixels[shown], strict=True
    ):
      photograph, turn = divmod(int(label), 4)
      places = _places(photographs[photograph], np.rot90(pixels, -turn))
      assert places
      for i, j in places:
        mask[photograph, i : i + 32, j : j + 32] = True
  assert not (seen[0] & seen[1]).any()


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


@pytest.mark.parametrize(
  ("data", "error", "message"),
  [
    ("cifar10", FileNotFoundError, r"`config.data_dir` must"),
    ("mnist", JobError, r"got 'mnist'"),
  ],
)
def test_unknown_and_missing_data_are_named(data, error, message):
  with pytest.raises(error, match=message):
    data_images.load_images(ConfigDict({"data": data, "data_dir": ""}))


def test_an_epoch_sees_every_example_once():
  batches = [data_images.batch_indices(10, 5, seed=1, step=s) for s in range(4)]
  first, second = np.concatenate(batches[:2]), np.concatenate(batches[2:])
  assert sorted(first) == sorted(second) == list(range(10))
  assert first.tolist() != second.tolist()
  with pytest.raises(JobError, match=r"`size` must be .*got 11"):
    data_images.batch_indices(10, 11, seed=0, step=0)


def test_batches_depend_on_seed_and_step_alone():
  late = data_images.batch_indices(1000, 10, seed=3, step=250)
  for step in range(5):
    data_images.batch_indices(1000, 10, seed=4, step=step)
  np.testing.assert_array_equal(
    late, data_images.batch_indices(1000, 10, seed=3, step=250)
  )
  assert late.tolist() != data_images.batch_indices(1000, 10, 4, 250).tolist()
