"""KIVI, Kitty and KVmix by their papers' own rules, token by token: ``python -m studies.papers``."""
