"""Settings that one decoding system or one trained part has alone: a dataclass each, which its row names.

They are given as ``decoding.options.NAME=VALUE`` and ``options.NAME=VALUE``.
"""

from collections.abc import Mapping
from typing import Any

from bebop.parsing import check, check_settings, from_dict


def parsed(cls: type | None, values: Mapping[str, Any], section: str, owner: str) -> Any:
    """The options ``cls`` of a system or part made of what was given; None where it has none.

    ``section``: what the names begin with; ``owner``: how a refusal calls whoever has no options.
    """
    if cls is None:
        check(not values, section.removesuffix("."), dict(values), f"{owner} has no options")
        return None
    options: Any = from_dict(cls, dict(values), section)
    check_settings(options, section)
    return options
