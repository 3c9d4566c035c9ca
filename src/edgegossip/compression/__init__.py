"""Compression of vectors in transit: fewer entries, fewer bits, and error feedback."""
