"""Whether the compiler may fuse a product and a sum into one operation that rounds once: a launch option of Triton's.

Its default is on up to Triton 3.9, with a warning, and off from 3.10, so each launch and each compilation says it.
"""

from typing import Final

FUSED: Final = {"enable_fp_fusion": True}  # faster, and as exact
UNFUSED: Final = {"enable_fp_fusion": False}  # each operation rounds, as in the reference: bytes and draws are equal
