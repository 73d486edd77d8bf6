# A process of its own, which needs the extra `browser`.
collect_ignore = ["browser.py"]
