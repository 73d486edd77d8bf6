"""Describes devices and links by measured curves or stated rates."""

from jaxmotion.perfmodel.platform._curve import Curve as Curve
from jaxmotion.perfmodel.platform._datasheets import (
  builtin_platform as builtin_platform,
)
from jaxmotion.perfmodel.platform._json import (
  load_platform as load_platform,
  platform_from_dict as platform_from_dict,
  platform_to_dict as platform_to_dict,
  save_platform as save_platform,
)
from jaxmotion.perfmodel.platform._platform import (
  Axis as Axis,
  Device as Device,
  Link as Link,
  Platform as Platform,
  find_axis as find_axis,
)
from jaxmotion.perfmodel.platform._units import (
  Rate as Rate,
  gbit_per_s as gbit_per_s,
  gbyte_per_s as gbyte_per_s,
)
