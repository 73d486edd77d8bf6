"""Measured steps beside predicted ones: cases, testbeds, scores."""
