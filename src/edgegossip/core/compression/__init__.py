"""Compression of vectors in transit: fewer entries, fewer bits, and a memory of the rest."""
