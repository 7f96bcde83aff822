"""Tools that a client runs: how a model family writes its calls, read as they come and forced by a grammar.

Each family is a file, and a line in ``families``. The parsers know text alone; dialects write what they find.
"""
