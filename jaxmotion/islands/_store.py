"""Objects of a run in a store, which every island lists, reads and writes.

The docstring of the room lists their names.
"""

import contextlib
import datetime
import pathlib
import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from jaxmotion import core
from jaxmotion.islands._message import MessageError

# One word without separators, so that no name leaves the run's prefix.
_ISLAND = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OBJECT = re.compile(
  r"(commit|snapshot)\.(\d{8})|(contribution|lease)\.(\d{8})\.([\w-]{1,64})",
  re.ASCII,
)


class StoreError(OSError):
  """A store that cannot be reached, or that refuses an operation.

  It has the kind of the error and the object's name. Addresses and credentials,
  which errors of stores may contain, are left out.

  Example:
    >>> from jaxmotion import islands
    >>> issubclass(islands.StoreError, OSError)
    True
  """


class Object(NamedTuple):
  """Name of an object: its kind, its round, and its island if it has one."""

  kind: str
  round: int
  island: str = ""

  @property
  def path(self) -> str:
    """Path below the run's prefix."""
    end = f".{self.island}" if self.island else ""
    return f"{self.kind}.{self.round:08d}{end}"


class Listing(NamedTuple):
  """Objects of a run at one time."""

  marks: dict[Object, Any]  # Changes when the object is written again.

  def rounds(self, kind: str) -> list[int]:
    """Returns the rounds of objects of a kind, in order."""
    return sorted(one.round for one in self.marks if one.kind == kind)

  def contributors(self, round: int) -> list[str]:
    """Returns the islands with a contribution to a round, in order."""
    return sorted(
      one.island
      for one in self.marks
      if (one.kind, one.round) == ("contribution", round)
    )


class Store:
  """Objects below one prefix of an object store, by way of obstore."""

  def __init__(self, store: Any, max_bytes: int, folder: str = ""):
    """Opens a URL or a folder; a store of obstore is taken as it is."""
    # max_bytes: of the largest object of the run. folder: below the prefix.
    self._start = f"{folder}/" if folder else ""
    self._max_bytes = max_bytes
    self._obstore = import_obstore()
    kinds = str | pathlib.Path | self._obstore.store.ObjectStore
    core.instance(kinds, "a folder, a URL or a store of obstore")(
      "store", store
    )
    if isinstance(store, str | pathlib.Path):
      with self._named_errors("the store"):
        store = _open_store(store, max_bytes)
    self._store = store

  def list(self) -> Listing:
    """Lists the objects of the run; other names are ignored."""
    marks = {}
    with self._named_errors("the list"):
      for chunk in self._obstore.list(self._store, self._start or None):
        for meta in chunk:
          path = meta["path"].removeprefix(self._start)
          if found := _OBJECT.fullmatch(path):
            kind, number, own_kind, own_number, island = found.groups()
            key = Object(
              kind or own_kind, int(number or own_number), island or ""
            )
            marks[key] = meta["e_tag"], meta["last_modified"]
    return Listing(marks)

  def read(self, name: Object) -> bytes | None:
    """Returns the bytes of an object, or None if there is none."""
    with self._named_errors(name.path), contextlib.suppress(FileNotFoundError):
      found = self._obstore.get(self._store, self._path(name))
      if found.meta["size"] > self._max_bytes:
        raise MessageError(f"{name.path} is refused: it is too large")
      return bytes(found.bytes())
    return None

  def create(self, name: Object, data: bytes) -> bool:
    """Writes a new object; returns False if there is one already."""
    exists = self._obstore.exceptions.AlreadyExistsError
    with self._named_errors(name.path), contextlib.suppress(exists):
      path = self._path(name)
      self._obstore.put(
        self._store, path, data, mode="create", use_multipart=False
      )
      return True
    return False

  def write(self, name: Object, data: bytes) -> None:
    """Writes an object, in place of one of that name."""
    with self._named_errors(name.path):
      self._obstore.put(
        self._store, self._path(name), data, use_multipart=False
      )

  def delete(self, names: Collection[Object]) -> None:
    """Deletes objects, of which some may be gone already."""
    # If one is, a folder may keep others. They are deleted with later rounds.
    with (
      self._named_errors("a deletion"),
      contextlib.suppress(FileNotFoundError),
    ):
      self._obstore.delete(self._store, list(map(self._path, names)))

  def _path(self, name: Object) -> str:
    """Returns the path of an object below the store's prefix."""
    return self._start + name.path

  @contextlib.contextmanager
  def _named_errors(self, place: str) -> Iterator[None]:
    """Raises `StoreError`, without the text of the store's own error."""
    try:
      yield
    except (self._obstore.exceptions.BaseError, OSError) as error:
      raise StoreError(f"{place}: {type(error).__name__}") from None


def import_obstore() -> Any:
  """Returns the module obstore; its error names the extra."""
  try:
    import obstore
    import obstore.exceptions
    import obstore.store
  except ImportError as error:
    raise ImportError(
      "`jaxmotion.islands` needs obstore: pip install 'jaxmotion[islands]'."
    ) from error
  return obstore


def _open_store(place: str | pathlib.Path, max_bytes: int) -> Any:
  """Opens the store of a URL, or of a folder, which is made if need be."""
  import obstore.store

  if isinstance(place, str) and "://" in place:
    # By default a request may take 30 s, whatever it sends, and is repeated for
    # minutes. Here it may be as slow as 8 Mbit/s.
    limit = datetime.timedelta(seconds=30 + max_bytes / 1e6)
    try:
      return obstore.store.from_url(
        place,
        client_options={"timeout": limit},
        retry_config={"max_retries": 1},
      )
    except ValueError:  # Its text may have the URL, and that credentials.
      raise ValueError(
        "`store` must be a folder or a URL that obstore opens, got another."
      ) from None
  return obstore.store.LocalStore(pathlib.Path(place).absolute(), mkdir=True)


def is_island(name: Any) -> bool:
  """Returns whether a value can be the name of an island."""
  return isinstance(name, str) and _ISLAND.fullmatch(name) is not None


def check_island(name: str, value: Any) -> Any:
  """Returns a name of an island, or raises."""
  if not isinstance(value, str):
    raise TypeError(f"`{name}` must be a string, got {value!r}.")
  if not is_island(value):
    raise ValueError(
      f"`{name}` must be 1 to 64 letters, digits, _ or -, got {value!r:.80}."
    )
  return value
