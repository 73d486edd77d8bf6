"""Pieces that all runners share: flags, rows, tables, checkpoints, timing."""
