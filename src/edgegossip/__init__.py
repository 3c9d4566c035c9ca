"""Train one PyTorch model together on machines of very different speed.

Every public name can be imported from here; `__init__.pyi` lists the names. Each is loaded when
first used, so that ``edgegossip --help`` does not wait for PyTorch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
