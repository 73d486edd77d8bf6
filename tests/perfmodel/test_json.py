import json

import pytest

from jaxmotion import perfmodel

PLATFORM = perfmodel.builtin_platform("cpu2")


def plain():
  """A platform with axes, links, curves, efficiencies and sources."""
  tree = json.loads(json.dumps(perfmodel.platform_to_dict(PLATFORM)))
  for part in (tree["device"], tree["axes"][0]["link"]):
    part["measured"] = dict(list(part["measured"].items())[:1])
    assert part["measured"]
  return tree


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


@pytest.mark.parametrize("field", ["axes", "to_host", "sources"])
def test_a_field_that_is_there_twice_is_refused(tmp_path, field):
  text = json.dumps(plain())[:-1] + f', "{field}": {{}}}}'
  with pytest.raises(ValueError, match=rf"'{field}' is there twice"):
    perfmodel.load_platform(save(tmp_path, text))


@pytest.mark.parametrize("length", [0, 1, 40, 1000, -2])
def test_a_cut_file_is_named(tmp_path, length):
  check_refused(save(tmp_path, json.dumps(plain()).encode()[:length]))


@pytest.mark.parametrize(
  "text",
  [b"\xff", "[" * 100_000, "[]", "3", "null", '"text"', "1" * 5000],
  ids=lambda text: repr(text[:4]),
)
def test_what_is_no_object_is_named(tmp_path, text):
  check_refused(save(tmp_path, text))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "1" * 400])
def test_numbers_that_are_no_figures_are_refused(tmp_path, number):
  tree = plain()
  for path in (("device", "kernel_s"), ("to_host", "rate", "bytes_per_s")):
    replace(tree, path, "HERE")
    check_refused(save(tmp_path, json.dumps(tree).replace('"HERE"', number)))


def test_fields_of_a_file_are_those_of_its_platform(tmp_path):
  tree = plain()
  tree.pop("device")
  for found in (tree, tree | {"devices": 3}, []):
    path = save(tmp_path, json.dumps(found))
    with pytest.raises((TypeError, ValueError), match=": `platform` must"):
      perfmodel.load_platform(path)
  with pytest.raises(ValueError, match="`plain` must have a field 'device'"):
    perfmodel.platform_from_dict(tree)


def test_an_absent_file_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match="here.json"):
    perfmodel.load_platform(tmp_path / "here.json")
