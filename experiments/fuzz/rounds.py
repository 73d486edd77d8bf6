"""Rounds of generated cases and the defects that they find."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Defect:
  """A generated case that broke a law of the library."""

  law: str  # The law, in a few words, such as "a NaN poisons its whole block".
  case: str  # An expression that rebuilds the case.
  detail: str  # What was found and what the law asks for.


@dataclasses.dataclass(frozen=True)
class Round:
  """The cases that one seed makes.

  A round shares its compilations: one program, many values.
  """

  cases: int  # Number of cases that were checked.
  defects: tuple[Defect, ...] = ()  # Cases that broke a law.
