"""Data that experiments train on: labeled images and bytes of text."""
