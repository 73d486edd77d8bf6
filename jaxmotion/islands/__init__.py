"""Training on islands that come and go, through any object store.

Data flows like this::

  trainer ---params--> Island.step ---change a - p, encoded---> Follower
  trainer <--params--- Island.step <--anchor of a new round---- Follower
                                                       |
                    contributions, commits, snapshots and leases in the store

`_outer_step` has the arithmetic, as pure functions. `_message` has the bytes of
objects, and `_store` their names. `_follower` decides rounds, in a thread, and
`_job` tells the other processes of an island what it read. `_fragment` sends
and moves one part of the parameters, and `_island` has the calls of a trainer.

The store has these objects:

========================== ===================================================
name, in round 12          content
========================== ===================================================
contribution.00000012.NAME change of an island
commit.00000012            contributions that were accepted
snapshot.00000012          anchor and outer state at the start of the round
lease.00000012.NAME        sign of life of an island that takes part then
========================== ===================================================

With several fragments, those of the second one begin with ``fragment.1/``, and
so on. Each fragment has rounds of its own.

Contributions, commits and snapshots are created once and never change: of
several writers the store lets one win. A lease is written again and again.

An island lists the store once a second, and ten times a second while its change
waits. A snapshot is written every ten rounds, or more seldom while it has more
than half of the bytes of the changes since the last one. Rounds before the last
snapshot but one are deleted.

Any machine and version of JAX reads an object. It has these bytes:

====== ========================================================================
bytes  content
====== ========================================================================
4      ``JMIS``
2      version of the format, little-endian: 1
4      length of the header in bytes, little-endian
header JSON in UTF-8; ``arrays`` has the dtype and shape of each array
arrays elements of each array, little-endian, in C order, without padding
32     SHA-256 of all bytes before
====== ========================================================================

The header of a contribution has ``kind``, ``round``, ``anchor`` (SHA-256 of
anchor and outer state), ``island``, ``tokens`` and ``codec`` (its `config()`).
Its arrays are the leaves of the codec's payloads. Nothing in an object is
executed, no path is made from one, and shapes are compared with those of the
run first. The SHA-256 finds damage, not an attacker.

Requests to a URL end after 30 s plus the time of their bytes at 8 Mbit/s.
"""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.islands._island import Island as Island, join as join
from jaxmotion.islands._message import MessageError as MessageError
from jaxmotion.islands._store import StoreError as StoreError

_set_public_module(__name__, globals())
