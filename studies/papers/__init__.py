"""KIVI, Kitty, KVmix and PatternKV by their papers' own rules, token by token: ``python -m studies.papers``."""
