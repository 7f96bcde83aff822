"""Studies behind figures of the docs, run from a checkout: ``python -m studies.accuracy``. No part of the package."""

import sys
from pathlib import Path

# `python -m` puts the checkout first on the path, where our kernels/ would shadow Hugging Face's package of that name.
if sys.path[0] in ("", str(Path(__file__).parents[1])):
    sys.path.append(sys.path.pop(0))
