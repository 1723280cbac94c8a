"""The exactness certificate: does a live engine sample from the distribution that it claims?

>>> from bebop.certify import certify  # doctest: +SKIP
>>> certify(sample, score, prompts, vocabulary=512).require_pass()  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bebop.certify.api import Cycle as Cycle
    from bebop.certify.api import certify as certify
    from bebop.certify.certificate import Certificate as Certificate
    from bebop.certify.certificate import NotCertified as NotCertified

_HOMES = {"certify": "api", "Cycle": "api", "Certificate": "certificate", "NotCertified": "certificate"}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: the statistics of this package must also work without an engine."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
