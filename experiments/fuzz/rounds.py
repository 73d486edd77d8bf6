"""Rounds of generated cases and the defects that they find."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Defect:
  """A generated case that broke a law of the library.

  Attributes:
    law: the law, in a few words, such as "a NaN poisons its whole block".
    case: an expression that rebuilds the case.
    detail: what was found and what the law asks for.
  """

  law: str
  case: str
  detail: str


@dataclasses.dataclass(frozen=True)
class Round:
  """The cases that one seed makes.

  A round shares its compilations: one program, many values.

  Attributes:
    cases: number of cases that were checked.
    defects: cases that broke a law.
  """

  cases: int
  defects: tuple[Defect, ...] = ()
