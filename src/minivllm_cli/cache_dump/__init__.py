"""The cache of a live engine as a document."""
