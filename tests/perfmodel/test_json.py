import dataclasses
import functools
import json

import pytest

from jaxmotion import perfmodel

PLATFORM = perfmodel.builtin_platform("cpu2")
CURVE = {"sizes": [1.0], "seconds": [-1.0], "noise": 0.0}
RATES = "matmul_flops_per_s"
NAMES = "h200_node a100_node h100_cluster ethernet_1gbit cpu2".split()


@functools.cache
def plain_text():
  """A platform with axes, links, curves, efficiencies and sources, as JSON."""
  tree = perfmodel.platform_to_dict(PLATFORM)
  for part in (tree["device"], tree["axes"][0]["link"]):
    part["measured"] = dict(list(part["measured"].items())[:1])
    assert part["measured"]
  return json.dumps(tree)


def plain():
  return json.loads(plain_text())


def paths(tree, path=()):
  """Paths of all values in dicts and lists, the first of a list for all."""
  items = tree.items() if isinstance(tree, dict) else list(enumerate(tree))[:1]
  for key, value in items:
    yield (*path, key)
    if isinstance(value, (dict, list)):
      yield from paths(value, (*path, key))


def replace(tree, path, value):
  *parents, last = path
  for key in parents:
    tree = tree[key]
  old, tree[last] = tree[last], value
  return old


def save(tmp_path, text):
  path = tmp_path / "here.json"
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  return path


def check_refused(path):
  """Asserts that a file is refused in one line that names it."""
  with pytest.raises((TypeError, ValueError)) as caught:
    perfmodel.load_platform(path)
  assert "here.json" in str(caught.value) and "\n" not in str(caught.value)


def test_a_platform_survives_json(tmp_path):
  path = tmp_path / "platform.json"
  no_host = dict(to_host=None, from_host=None, sources={})
  alone = dataclasses.replace(PLATFORM, **no_host)
  for platform in (alone, *map(perfmodel.builtin_platform, NAMES)):
    perfmodel.save_platform(platform, path)
    assert perfmodel.load_platform(path) == platform


def test_a_missing_figure_is_named():
  optional = {"call_s", "shared_by", "efficiency", "measured", "sources"}
  found = 0
  for path in paths(plain()):
    *parents, last = path
    if isinstance(last, int) or optional & {*path} or parents[-1:] == [RATES]:
      continue
    tree = plain()
    inner = tree
    for key in parents:
      inner = inner[key]
    del inner[last]
    with pytest.raises(ValueError, match=f"must have a field '{last}'"):
      perfmodel.platform_from_dict(tree)
    found += 1
  assert found > 15


def test_an_error_in_a_file_has_its_path(tmp_path):
  link = ("axes", 0, "link")
  curves, misspelt = {"elementwise": CURVE}, {"all_redcue": 0.1}
  for path, value, text in (
    ((*link, "rate", "bytes_per_s"), -1, r"`axes\[0\].link.rate` is not valid"),
    ((*link, "efficiency"), misspelt, r"axes\[0\].*ciency\['all_redcue'"),
    (("to_host",), 64e9, "`to_host` must be a dict"),
    (("device", "measured"), curves, r"`device.measured\['elementwise'\]`"),
  ):
    tree = plain()
    replace(tree, path, value)
    with pytest.raises((TypeError, ValueError), match=text):
      perfmodel.platform_from_dict(tree)
  tree = plain()
  tree["device"]["memory_gb"] = 80
  path = save(tmp_path, json.dumps(tree))
  with pytest.raises(ValueError, match=r"`device` must have.*got 'memory_gb'"):
    perfmodel.load_platform(path)
  with pytest.raises(ValueError, match="'name', got no field at all"):
    perfmodel.platform_from_dict({})


def test_values_of_other_types_are_refused(tmp_path):
  wrong = (None, True, 3.5, "text", [], [["a", 1]], {}, {"a": 1})
  found = 0
  for path in paths(plain()):
    for value in wrong:
      tree = plain()
      old = replace(tree, path, value)
      is_number = type(old) in (int, float)
      if type(value) is type(old) or (is_number and type(value) is float):
        continue
      check_refused(save(tmp_path, json.dumps(tree)))
      found += 1
  assert found > 100


def test_texts_that_are_no_platform_and_numbers_that_are_no_figures_are_refused(
  tmp_path,
):
  text = plain_text()[:-1] + ', "sources": {}}'
  with pytest.raises(ValueError, match="'sources' is there twice"):
    perfmodel.load_platform(save(tmp_path, text))
  whole = plain_text().encode()
  for text in (
    *(whole[:length] for length in (0, 1, 40, 1000, -2)),
    *(b"\xff", "[" * 100_000, "[]", "3", "null", '"text"', "1" * 5000),
  ):
    check_refused(save(tmp_path, text))
  for path in (("device", "kernel_s"), ("to_host", "rate", "bytes_per_s")):
    tree = plain()
    replace(tree, path, "HERE")
    for number in ("NaN", "Infinity", "1e999", "1" * 400):
      text = json.dumps(tree).replace('"HERE"', number)
      check_refused(save(tmp_path, text))


def test_fields_of_a_file_are_those_of_its_platform(tmp_path):
  tree = plain()
  tree.pop("device")
  for found in (tree, tree | {"devices": 3}, []):
    path = save(tmp_path, json.dumps(found))
    with pytest.raises((TypeError, ValueError), match=": `platform` must"):
      perfmodel.load_platform(path)
  with pytest.raises(ValueError, match="`plain` must have a field 'device'"):
    perfmodel.platform_from_dict(tree)
