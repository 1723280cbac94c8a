"""Stands in for torchvision, whose wheel needs another build of torch; SGLang and vLLM use it for images only."""

import sys
from unittest.mock import MagicMock

__version__ = "0.0.0"
for _name in ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional", "io", "ops"):
    _module = MagicMock(name=f"torchvision.{_name}")
    _module.__spec__, _module.__path__ = None, []
    sys.modules[f"torchvision.{_name}"] = _module
transforms, io, ops = (sys.modules[f"torchvision.{_name}"] for _name in ("transforms", "io", "ops"))
