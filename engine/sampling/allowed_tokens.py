"""The ``allowed_tokens`` of a request: a function of the caller's that names the tokens that may come next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from itertools import islice

from ..errors import RequestError
from ..validation import check_ids

FIELD = "allowed_tokens"


class AllowedTokens:
    """Calls the function before each token, in the engine's thread, and checks what it returns."""

    def __init__(self, function: Callable[[list[int]], Collection[int] | None], vocab_size: int):
        """``vocab_size`` is the number of rows of the model's output."""
        self._function, self._vocab_size = function, vocab_size

    def after(self, output_ids: Sequence[int]) -> list[int] | None:
        """The tokens that may follow the output so far, each once; None for all. Raises ``RequestError``."""
        try:
            found = self._function(list(output_ids))
            ids = list(islice(found, self._vocab_size + 1)) if isinstance(found, Set | range) else found
        except BaseException as error:  # ``sys.exit()`` is no reason to end the engine's thread
            raise RequestError(f"the function raised {type(error).__name__}: {error}", field=FIELD) from error
        if ids is None:
            return None
        checked = list(dict.fromkeys(check_ids(FIELD, ids, self._vocab_size, self._vocab_size)))
        if not checked:
            raise RequestError("the function allows no token at all", field=FIELD, value=found)
        return checked
