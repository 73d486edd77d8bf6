"""Stratified random sampling of positions."""

from jaxmotion.kernels.sample._reference import (
  draw_stratified as draw_stratified,
  stratum_sizes as stratum_sizes,
)
