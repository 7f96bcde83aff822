"""KIVI, Kitty, KVmix, XQuant and PatternKV by their papers' own rules, token by token: ``python -m studies.papers``."""
