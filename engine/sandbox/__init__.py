"""Work on what strangers wrote, templates and grammars, in processes of their own under limits of time and memory."""

from .process import Job, ProcessEndedError, Refusal
from .sandbox import Sandbox
from .turns import Sandboxes

__all__ = ["Job", "ProcessEndedError", "Refusal", "Sandbox", "Sandboxes"]
