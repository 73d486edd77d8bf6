"""Positions drawn at random."""

from jaxmotion.kernels.sample._reference import (
  stratified as stratified,
  stratum_sizes as stratum_sizes,
)
