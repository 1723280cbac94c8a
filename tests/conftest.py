"""Triton's interpreter where there is no GPU: its variable must be set before anything imports triton.

Here and not beside the kernels' tests: folders are collected in alphabetical order, and transformers imports triton.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
