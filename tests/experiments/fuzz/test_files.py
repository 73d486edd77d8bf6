import json

import numpy as np
import pytest
from PIL import Image

from experiments.common import records
from experiments.data import image_files
from experiments.data.labels import Images
from experiments.fuzz import files
from jaxmotion import perfmodel


def test_damaged_files_give_what_they_say_or_one_line():
  found = files.run_round(0)
  assert found.cases > 100
  assert not found.defects, found.defects[0]


def test_a_case_is_rebuilt_from_its_seed():
  kind = files.KINDS[0]
  assert files.make_case(kind, 3, 7) == files.make_case(kind, 3, 7)
  assert files.make_case(kind, 3, 7) != files.make_case(kind, 4, 7)


def load_without_name(path):
  return perfmodel.platform_from_dict(json.loads(path.read_text()))


def read_without_checksum(path, size):
  with Image.open(path) as image:
    return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize(
  ("room", "name", "broken", "law"),
  [
    (records, "_make_row", lambda _, f: records.Row(**f), "another type"),
    (records, "_parse_line", lambda *a: {}, "a valid file"),
    (records, "read_rows", lambda path: [], "values that it says"),
    (perfmodel, "load_platform", load_without_name, "in one line"),
    (image_files, "_read_image", read_without_checksum, "another type"),
    (
      image_files,
      "make_images",
      lambda name, pixels, labels, classes: Images(pixels, labels),
      "another type",
    ),
  ],
  ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_reader_without_a_check_is_found(
  monkeypatch, room, name, broken, law
):
  monkeypatch.setattr(room, name, broken)
  laws = {defect.law for defect in files.run_round(0).defects}
  assert any(law in found for found in laws), laws
