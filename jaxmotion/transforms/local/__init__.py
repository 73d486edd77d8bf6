"""Local updates: workers that train apart and exchange at times."""
