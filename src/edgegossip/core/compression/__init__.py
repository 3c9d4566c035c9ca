"""Compression of vectors that travel: fewer entries, fewer bits, and a memory of the rest."""
