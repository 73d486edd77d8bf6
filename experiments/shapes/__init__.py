"""Times of awkward shapes and numbers of workers beside a friendly matrix."""
