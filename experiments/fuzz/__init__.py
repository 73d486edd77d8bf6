"""Generated cases, checked against the stated laws of the library."""
