"""KIVI, Kitty, KVmix and XQuant by their papers' own rules, token by token: ``python -m studies.papers``."""
