"""Fragments of a model, which take turns in messages."""

from __future__ import annotations


def fragment(place: int, num_fragments: int, numel: int) -> slice:
    """Return the entries of a fragment; fragments' lengths differ by at most one.

    >>> [fragment(place, 3, 7) for place in range(3)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 7, None)]
    """
    return slice(place * numel // num_fragments, (place + 1) * numel // num_fragments)
