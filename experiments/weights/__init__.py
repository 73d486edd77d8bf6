"""What training moves between a host and its device: networks, cases, links."""
