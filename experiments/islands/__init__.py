"""Islands that train through an object store: simulated, and on slow links."""
