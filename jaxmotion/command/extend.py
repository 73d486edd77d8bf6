"""Second tier of the command line, for commands of `experiments`."""

from jaxmotion.command._platforms import read_platform as read_platform
from jaxmotion.command._user_file import (
  CommandError as CommandError,
  UserTask as UserTask,
  call_user as call_user,
  check_task as check_task,
  load_function as load_function,
  name_flags as name_flags,
)
from jaxmotion.core import set_public_module as _set_public_module

_set_public_module(__name__, globals())
