"""Names for writing an algorithm: ``eg.contract``.

An algorithm whose workers wait for each other derives from `RoundBased`, or from
`NeighborAveraging` if it averages. An algorithm whose workers do not wait derives from
`Asynchronous`. Any other algorithm derives from `Algorithm` and answers events with effects
itself. `docs/contract.md` gives the rules.

Each name is imported when first used; `__init__.pyi` lists them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
