"""Training on islands that come and go, through any object store.

Data flows like this::

  trainer ---params--> Island.step ---change a - p, encoded---> Follower
  trainer <--params--- Island.step <--anchor of a new round---- Follower
                                                       |
                    contributions, commits, snapshots and leases in the store

`_outer_step` has the arithmetic, as pure functions. `_message` has the bytes of
objects, and `_store` their names. `_follower` decides rounds, in a thread.
"""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.islands._island import Island as Island, join as join
from jaxmotion.islands._message import MessageError as MessageError
from jaxmotion.islands._store import StoreError as StoreError

_set_public_module(__name__, globals())
