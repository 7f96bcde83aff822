"""Strict reading of a JSON object that somebody else wrote: every value is checked for type and range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from qkv_engine.errors import ModelError

T = TypeVar("T")


class Fields:
    """Typed access to one JSON object; ``null`` counts as absent. Refusals are ``ModelError``, naming the field."""

    def __init__(self, values: object, where: str = ""):
        if not isinstance(values, dict):
            raise ModelError(f"{where or 'config.json'} must be a JSON object, not {type(values).__name__}")
        self.values: dict[str, Any] = values
        self._prefix = f"config.json: {where}." if where else "config.json: "

    def given(self, **defaults: Any) -> Fields:
        """The same object with ``defaults`` for fields that it leaves out; ``null`` counts as given."""
        found = Fields({**defaults, **self.values})
        found._prefix = self._prefix
        return found

    def without(self, *names: str) -> Fields:
        """The same object with ``names`` left out."""
        found = Fields({name: value for name, value in self.values.items() if name not in names})
        found._prefix = self._prefix
        return found

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not low <= value <= high:
            raise self.error(name, f"must be an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        value = self.get(name)
        if value is None and default is not None:
            return default
        # Compared before conversion: a huge int has no float, and NaN fails both comparisons.
        if type(value) not in (int, float) or not low <= value <= high:
            raise self.error(name, f"must be a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.error(name, "must be true or false")
        return value

    def string(self, name: str, default: str) -> str:
        value = self.get(name)
        if value is None:
            return default
        if type(value) is not str:
            raise self.error(name, "must be a string")
        return value

    def choice(self, name: str, choices: Mapping[str, T], default: str, message: str) -> T:
        """The value that ``choices`` has for the field's string; ``message`` refuses any other one."""
        found = self.string(name, default)
        if found not in choices:
            raise self.error(name, message, f"Supported: {', '.join(choices)}")
        return choices[found]

    def numbers(self, name: str, low: float, high: float) -> tuple[float, ...]:
        """A list of numbers in the range."""
        value = self.get(name)
        if not isinstance(value, list) or any(type(x) not in (int, float) or not low <= x <= high for x in value):
            raise self.error(name, f"must be a list of numbers from {low:g} to {high:g}")
        return tuple(float(x) for x in value)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """One id, a list of ids or ``null``, as a tuple without repeats."""
        value = self.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(i) is not int or not 0 <= i < vocab_size for i in ids):
            raise self.error(name, f"must be token ids from 0 to {vocab_size - 1}")
        return tuple(dict.fromkeys(ids))

    def error(self, name: str, message: str, remedy: str | None = None) -> ModelError:
        return ModelError(message, field=self._prefix + name, value=self.get(name), remedy=remedy)
