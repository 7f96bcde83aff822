"""Device functions of dense sides: ``[H][page tokens][D]`` elements, token rows contiguous."""

from __future__ import annotations

import torch
import triton.language as tl

TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
