"""The judge itself finds what it is there to find."""

from tests.arguments.calls import Call
from tests.arguments.judge import find_defects


def accept_silently(size: int) -> None:
  del size


def raise_raw(size: int) -> None:
  [None][: 1 + size]


def name_another(size: int) -> None:
  if size != 3:
    raise ValueError(f"`sizes` must be 3, got {size!r}.")


def forget_value(size: int) -> None:
  if size != 3:
    raise ValueError("`size` must be 3.")


def never_end(size: int) -> None:
  while size != 3:
    pass


def refuse_clearly(size: int) -> None:
  if type(size) is not int or size < 0:
    raise ValueError(f"`size` must be an integer >= 0, got {size!r}.")


def labels(function, accepted=()):
  defects = find_defects("f", Call(3, on=function), dict(accepted))
  return {line.split()[0] for line in defects.get("size", [])}


def test_silent_acceptance_is_a_defect():
  found = labels(accept_silently)
  assert {"none", "misspelt", "minus_one", "true", "tracer"} <= found
  assert "numpy" not in found


def test_a_raw_traceback_is_a_defect():
  assert {"none", "misspelt", "object", "tracer"} <= labels(raise_raw)


def test_an_error_without_the_name_or_the_value_is_a_defect():
  assert "none" in labels(name_another)
  assert "none" in labels(forget_value)


def test_a_call_that_never_ends_is_a_defect(monkeypatch):
  monkeypatch.setattr("tests.arguments.judge.LIMIT_S", 0.01)
  assert "huge" in labels(never_end)


def test_listed_values_are_no_defect():
  assert labels(refuse_clearly) == {"zero", "huge"}
  reasons = {("f", "size"): {"zero": "nothing"}, ("*", "size"): {"huge": "all"}}
  assert labels(refuse_clearly, reasons) == set()
