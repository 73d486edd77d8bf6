import pytest

from jaxmotion.core import PathRules

PATHS = ["a/bias", "a/kernel", "b/kernel"]


def test_the_first_pattern_that_is_found_decides():
  rules = PathRules([("bias", 1), ("a/", 2), ("", 3)])
  assert [rules.require_match(p, "").value for p in PATHS] == [1, 2, 3]
  assert [rules.require_match(p, "").rule for p in PATHS] == [0, 1, 2]


def test_a_path_without_a_rule_is_named_with_what_to_add():
  rules = PathRules([("bias", 1)], name="groups")
  assert rules.first_match("b/kernel") is None
  with pytest.raises(ValueError, match=r"`groups` must cover .* end with X"):
    rules.require_match("b/kernel", "X")


def test_a_pattern_without_a_path_is_named():
  rules = PathRules([("a/", 1), ("nope", 2)])
  with pytest.raises(
    ValueError, match="`rules` must match a leaf each, got 'n"
  ):
    rules.require_use(PATHS)
  PathRules([("a/", 1), ("kernel", 2)]).require_use(PATHS)


@pytest.mark.parametrize("rule", ["ab", ("a",), (1, 2), None])
def test_what_is_no_pair_is_a_type_error(rule):
  with pytest.raises(TypeError, match="must be pairs of a pattern and a codec"):
    PathRules([rule], value="codec")


def test_what_is_no_expression_is_named():
  with pytest.raises(ValueError, match=r"must have regular expressions, got"):
    PathRules([("(", 1)])
